"""Records the same sites from the implementation in Hugging Face ``transformers``: its main model, without MTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

from steptron.checkpoint.released.model_config import write_model_config
from steptron.checkpoint.released.names import Precision, released_tensors
from steptron.checkpoint.released.transformers_names import FUSED_AXIS, transformers_name
from steptron.checkpoint.weights import Weights
from steptron.config.schema import ModelConfig, MtpConfig
from steptron.errors import UserError
from steptron.inspection.archive import Array
from steptron.inspection.cursor import Cursor
from steptron.inspection.recording import Recorder
from steptron.inspection.replay import replayed, weigh
from steptron.inspection.sites import Site, ascending
from steptron.inspection.sites import sites as own_sites
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.model.transformer_config import DTYPES

OLDEST = (5, 16)
"""The first release of transformers that has the model."""
_HEAD = "lm_head"
_NOT_ITS_KEYS = ("architectures", "auto_map", "model_type", "torch_dtype")


def without_mtp(model: ModelConfig) -> ModelConfig:
    """The main model alone, which is what transformers has a class for."""
    return model.model_copy(update={"mtp": MtpConfig(depths=0)})


def load_transformers(weights: Weights, model: ModelConfig, precision: Precision) -> nn.Module:
    """Builds transformers' ``Step3p7TextModel`` on the CPU, with the output matrix as ``lm_head``, and fills it.

    Args:
        weights: where from.
        model: the architecture, as :func:`without_mtp` makes it; it may have other options than the weights' own.
        precision: of the parameters; selection biases stay float32.

    Raises:
        UserError: transformers is not installed or too old.
        ConfigError: the model has options that transformers does not have, or the weights do not fit it.
    """
    _require()
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    # Token ids and the longest length are no part of the forward pass.
    keys: Mapping[str, Any] = write_model_config(
        model, precision, bos_token_id=0, eos_token_id=0, max_position_embeddings=2**31 - 1
    )
    config = Step3p7TextConfig(**{key: value for key, value in keys.items() if key not in _NOT_ITS_KEYS})
    config._attn_implementation = "eager"
    trunk: nn.Module = Step3p7TextModel(config)
    trunk.add_module(_HEAD, nn.Linear(model.hidden_size, model.vocab_size, bias=False))
    trunk.eval()
    for parameter in trunk.parameters():
        # Not its buffers: selection biases and RoPE frequencies are float32 whatever the model is.
        parameter.data = parameter.data.to(DTYPES[precision])
    _fill(trunk, weights, model_spec(model))
    return trunk


@torch.no_grad()
def trace_transformers(
    trunk: nn.Module,
    ids_BS: torch.Tensor,
    sites: Sequence[Site],
    experts: Mapping[int, torch.Tensor] | None = None,
) -> Iterator[tuple[str, Array]]:
    """Runs token ids, row by row, and yields the values of sites as ``steptron.inspection.trace.trace`` does.

    Args:
        trunk: from :func:`load_transformers`.
        ids_BS: int64 [B, S].
        sites: which values; from :func:`transformers_sites`.
        experts: routing to replay, by layer.
    """
    batch, length = ids_BS.shape
    cursor = Cursor.whole(length)
    recorder = Recorder(cursor)
    handles = [
        trunk.get_submodule(f"layers.{layer}.mlp.gate").register_forward_hook(_replay_hook(cursor, experts_BSK))
        for layer, experts_BSK in (experts or {}).items()
    ]
    try:
        with recorder.listening(trunk, sites):
            for row, ids_S in enumerate(ids_BS):
                cursor.row = row
                hidden = trunk(input_ids=ids_S.unsqueeze(0)).last_hidden_state
                logits = trunk.get_submodule(_HEAD)(hidden)
                if any(site.name == "logits" for site in sites):
                    recorder.record("logits", logits)
    finally:
        for handle in handles:
            handle.remove()
    yield from recorder.gather([site.name for site in sites], batch, length)


def transformers_sites(spec: ModelSpec) -> list[Site]:
    """The sites of ``steptron.inspection.sites`` that transformers' model has too, read from its modules."""
    scaling = {layer.index: getattr(layer.ffn, "scaling_factor", 1.0) for layer in spec.layers}
    found = []
    for site in own_sites(spec):
        layer = re.match(r"layers\.(\d+)\.", site.name)
        found.append(Site(site.name, _module(site), _reader(site, scaling[int(layer[1])] if layer else 1.0)))
    return found


def _module(site: Site) -> str | None:
    if site.module is None:
        return None
    path = {"embedding": "embed_tokens", "final_norm": "norm"}.get(site.module, site.module)
    for own, theirs in (
        (".ffn.router", ".mlp.gate"),
        (".ffn.shared", ".mlp.shared_experts"),
        (".ffn", ".mlp"),
        (".attention", ".self_attn"),
    ):
        if path.endswith(own):
            return path.removesuffix(own) + theirs
    return path


def _reader(site: Site, scaling: float) -> Callable[[Any, Any], torch.Tensor]:
    """Reads a site from what transformers' module hands on: of the router (logits, weights before scaling, experts)."""
    if site.name.endswith(".router.scores"):
        return lambda _, output: output[0].float().sigmoid()
    if site.name.endswith(".router.experts"):
        return lambda _, output: ascending(output[2])[0]
    if site.name.endswith(".router.weights"):
        return lambda _, output: output[1].gather(1, ascending(output[2])[1]) * scaling
    if site.name.endswith(".attention.output"):
        return lambda _, output: output[0]
    return site.read


def _replay_hook(cursor: Cursor, experts: torch.Tensor) -> Callable[[nn.Module, object, Any], Any]:
    def hook(_: nn.Module, __: object, output: Any) -> Any:
        logits_TE, _weights, own_TK = output
        experts_TK = replayed(own_TK, cursor.take(experts))
        return logits_TE, weigh(logits_TE.float().sigmoid(), experts_TK, 1.0), experts_TK

    return hook


@torch.no_grad()
def _fill(trunk: nn.Module, weights: Weights, spec: ModelSpec) -> None:
    targets = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    for tensor in released_tensors(spec):
        place = transformers_name(tensor.name, len(spec.layers))
        name, part = place if place is not None else (tensor.name, "whole")
        target = targets[name]
        if part != "whole":
            target = target.chunk(2, dim=FUSED_AXIS)[part == "second_half"]
        target.copy_(weights.read([tensor.name])[tensor.name])


def _require() -> None:
    wanted = f"transformers {OLDEST[0]}.{OLDEST[1]} or newer"
    install = f"`pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'`"
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise UserError(f"--implementation transformers needs {wanted}, which is not installed: {install}") from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise UserError(f"--implementation transformers needs {wanted}, and {version} is installed: {install}")
