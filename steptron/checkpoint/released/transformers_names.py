"""The released tensors in transformers' implementation of the model: which of its names holds which tensor.

``Step3p7TextModel`` (transformers 5.16 and newer) is the model without an output matrix and without MTP. Its names have
no ``model.`` in front, what belongs to a mixture of experts lies under ``mlp``, and the experts' gate and up matrices
are one tensor of shape [experts, 2 x width, hidden]: gate above up. Everything else is the released tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal["whole", "first_half", "second_half"]
"""Which part of a transformers tensor; halves are those of axis 1."""

HEAD = "lm_head.weight"
FUSED_AXIS = 1

_OUTSIDE: Mapping[str, str] = {"model.embed_tokens.weight": "embed_tokens.weight", "model.norm.weight": "norm.weight"}
_LAYER: Mapping[str, tuple[str, Part]] = {
    "input_layernorm.weight": ("input_layernorm.weight", "whole"),
    "post_attention_layernorm.weight": ("post_attention_layernorm.weight", "whole"),
    "self_attn.q_proj.weight": ("self_attn.q_proj.weight", "whole"),
    "self_attn.k_proj.weight": ("self_attn.k_proj.weight", "whole"),
    "self_attn.v_proj.weight": ("self_attn.v_proj.weight", "whole"),
    "self_attn.g_proj.weight": ("self_attn.g_proj.weight", "whole"),
    "self_attn.q_norm.weight": ("self_attn.q_norm.weight", "whole"),
    "self_attn.k_norm.weight": ("self_attn.k_norm.weight", "whole"),
    "self_attn.o_proj.weight": ("self_attn.o_proj.weight", "whole"),
    "mlp.gate_proj.weight": ("mlp.gate_proj.weight", "whole"),
    "mlp.up_proj.weight": ("mlp.up_proj.weight", "whole"),
    "mlp.down_proj.weight": ("mlp.down_proj.weight", "whole"),
    "moe.gate.weight": ("mlp.gate.weight", "whole"),
    # A buffer in transformers; it stays fp32 in a model of another dtype.
    "moe.router_bias": ("mlp.gate.e_score_correction_bias", "whole"),
    "moe.gate_proj.weight": ("mlp.experts.gate_up_proj", "first_half"),
    "moe.up_proj.weight": ("mlp.experts.gate_up_proj", "second_half"),
    "moe.down_proj.weight": ("mlp.experts.down_proj", "whole"),
    "share_expert.gate_proj.weight": ("mlp.shared_experts.gate_proj.weight", "whole"),
    "share_expert.up_proj.weight": ("mlp.shared_experts.up_proj.weight", "whole"),
    "share_expert.down_proj.weight": ("mlp.shared_experts.down_proj.weight", "whole"),
}
_MTP_MARK = "enorm.weight"


def transformers_name(released: str, num_layers: int) -> tuple[str, Part] | None:
    """Where transformers' model holds a released tensor.

    Args:
        released: the tensor's released name.
        num_layers: decoder layers; ``model.layers.<num_layers>`` and those behind it are MTP depths.

    Returns:
        The name of the parameter or buffer and which part of it, or None for what that model does not hold: the output
        matrix, the MTP depths, and names that are not the release's.
    """
    if released in _OUTSIDE:
        return _OUTSIDE[released], "whole"
    layer, suffix = _split(released, "model.layers.")
    if layer is None or layer >= num_layers or suffix not in _LAYER:
        return None
    name, part = _LAYER[suffix]
    return f"layers.{layer}.{name}", part


def released_names(transformers: str) -> tuple[str, ...]:
    """The released tensors that one of transformers' tensors holds, in their order along axis 1.

    Returns:
        Two names for the experts' fused gate and up, none where the name is not that model's, otherwise one. The
        output matrix has the same name in both.
    """
    if transformers == HEAD:
        return (HEAD,)
    layer, suffix = _split(transformers, "layers.")
    if layer is None:
        return tuple(name for name, other in _OUTSIDE.items() if other == transformers)
    return tuple(f"model.layers.{layer}.{name}" for name, (other, _) in _LAYER.items() if other == suffix)


def mtp_layers(released: Mapping[str, object]) -> frozenset[int]:
    """The layers that are MTP depths, by a whole model's released names: they alone have an ``enorm``."""
    split = (_split(name, "model.layers.") for name in released)
    return frozenset(layer for layer, suffix in split if layer is not None and suffix == _MTP_MARK)


def layer_of(released: str) -> int | None:
    """The number in ``model.layers.<number>.``, None for what belongs to no layer."""
    return _split(released, "model.layers.")[0]


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights by transformers' names: every parameter and buffer of ``Step3p7TextModel``.

    The tensors are those given, without a copy; the experts' gate and up are put together in a new one. MTP depths are
    left out. The output matrix, which is not part of that model, is there as ``lm_head.weight``.

    Args:
        weights: every tensor of a model by released name; MTP depths may be missing.

    Raises:
        ValueError: a tensor has no place, or one of a pair of gate and up is missing; every one is named.
    """
    import torch

    depths = mtp_layers(weights)
    num_layers = 1 + max((layer for name in weights if (layer := layer_of(name)) is not None), default=-1)
    num_layers = min(depths, default=num_layers)
    halves: dict[str, dict[Part, Tensor]] = {}
    result: dict[str, Tensor] = {}
    problems = []
    for released, tensor in weights.items():
        place = transformers_name(released, num_layers)
        if released == HEAD:
            result[HEAD] = tensor
        elif place is None:
            if layer_of(released) not in depths:
                problems.append(f"{released} has no place in transformers' model")
        elif place[1] == "whole":
            result[place[0]] = tensor
        else:
            halves.setdefault(place[0], {})[place[1]] = tensor
    for name, pair in halves.items():
        if len(pair) == 2:
            result[name] = torch.cat([pair["first_half"], pair["second_half"]], dim=FUSED_AXIS)
        else:
            problems.append(f"{name} needs both {' and '.join(released_names(name))}")
    if problems:
        raise ValueError("; ".join(problems))
    return result


def _split(name: str, prefix: str) -> tuple[int | None, str]:
    """Layer number and the rest of a layer's tensor's name; None and the name otherwise."""
    number, dot, suffix = name.removeprefix(prefix).partition(".")
    if name.startswith(prefix) and dot and number.isdecimal():
        return int(number), suffix
    return None, name
