"""The attention module against a slow float64 reference, its mistakes, and transformers' Step-3.5."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from steptron.config.schema import ParallelConfig
from steptron.model.attention import SelfAttention
from steptron.model.layer_spec import AttentionKind, AttentionSpec, LayerSpec, RopeScaling, RopeSpec, model_spec
from steptron.model.rope import rope_tables
from steptron.model.sequence import SequenceContext
from steptron.model.transformer_config import transformer_config
from steptron.parallel.sequence_shard import SequenceShard
from tests.model.helpers import relative_error, single_process, small_config

HIDDEN, EPS, LENGTH, BATCH = 16, 1e-5, 14, 2
SCALING = RopeScaling(factor=2.0, low_freq_factor=1.0, high_freq_factor=32.0, original_length=64)
FULL = AttentionSpec(AttentionKind.FULL, 4, 2, 8, None, RopeSpec(5e6, 4, SCALING), gate=True, sink=False)
SLIDING = AttentionSpec(AttentionKind.SLIDING, 6, 2, 8, 5, RopeSpec(1e4, 8, None), gate=True, sink=False)
SPECS = {
    "full": FULL,
    "sliding": SLIDING,
    "sliding with sink": replace(SLIDING, gate=False, sink=True),
    "full with gate and sink": replace(FULL, sink=True),
    "plain": replace(FULL, gate=False),
}


@pytest.fixture(autouse=True, scope="module")
def _groups() -> Iterator[None]:
    single_process()
    yield


def engine_config(dtype: torch.dtype = torch.float64) -> TransformerConfig:
    return transformer_config(small_config(), ParallelConfig(), dtype)


def build(
    spec: AttentionSpec, hidden: int = HIDDEN, dtype: torch.dtype = torch.float64, seed: int = 0
) -> SelfAttention:
    module = SelfAttention(spec, hidden, EPS, engine_config(dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.4 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return module


def context_of(documents_BS: Tensor | None = None, batch: int = BATCH, length: int = LENGTH) -> SequenceContext:
    """Positions that restart with each document."""
    positions_BS = torch.arange(length).expand(batch, length)
    if documents_BS is not None:
        first_BS = (documents_BS[:, :, None] == documents_BS[:, None, :]).int().argmax(-1)
        positions_BS = positions_BS - first_BS
    return SequenceContext(positions_BS, documents_BS, SequenceShard.whole(length))


def inputs(hidden: int = HIDDEN, batch: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    h, d_output = (torch.randn(length, batch, hidden, dtype=torch.float64, generator=generator) for _ in range(2))
    return h, d_output


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7 + [-1] * 3, [0] * 9 + [1] * 5])


# ------------------------------------------------------------------------- the slow reference


def rotate(head: Tensor, position: int, rope: RopeSpec, interleaved: bool = False) -> Tensor:
    width = rope.rotary_dim
    parts = list(head.unbind())
    for m in range(width // 2):
        omega = rope.theta ** (-2.0 * m / width)
        if rope.scaling is not None:
            s = rope.scaling
            turns = s.original_length * omega / (2 * math.pi)
            share = min(1.0, max(0.0, (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)))
            omega = omega * share + omega / s.factor * (1 - share)
        cos, sin = math.cos(omega * position), math.sin(omega * position)
        i, j = (2 * m, 2 * m + 1) if interleaved else (m, m + width // 2)
        parts[i], parts[j] = parts[i] * cos - parts[j] * sin, parts[i] * sin + parts[j] * cos
    return torch.stack(parts)


def reference(
    parameters: dict[str, Tensor], spec: AttentionSpec, h_SBH: Tensor, context: SequenceContext, mistake: str = ""
) -> Tensor:
    """Facts of the release, 2.3, one head of one token at a time; ``mistake`` does one thing wrong."""
    n, g, D = spec.num_heads, spec.num_kv_groups, spec.head_dim
    rows = parameters["input_projection.weight"]
    w_q, w_k, w_v, w_gate = rows.split([n * D, g * D, g * D, n if spec.gate else 0])
    rope = replace(spec.rope, rotary_dim=D) if mistake == "full rotation" else spec.rope
    rope = replace(rope, scaling=None) if mistake == "no scaling" else rope
    window = None if spec.window is None else spec.window + {"window + 1": 1, "window - 1": -1}.get(mistake, 0)

    def norm(head: Tensor, weight: Tensor) -> Tensor:
        gamma = weight if mistake == "gamma" else 1 + weight
        return head / torch.sqrt((head * head).mean() + EPS) * gamma

    def prepare(head: Tensor, weight: Tensor, position: int) -> Tensor:
        if mistake == "rope before norm":
            return norm(rotate(head, position, rope), weight)
        return rotate(norm(head, weight), position, rope, interleaved=mistake == "interleaved rotation")

    length, batch, _ = h_SBH.shape
    outputs = []
    for b in range(batch):
        position = context.positions_BS[b].tolist()
        document = None if context.documents_BS is None else context.documents_BS[b].tolist()
        q = [
            [prepare(x, parameters["query_norm.weight"], position[s]) for x in (w_q @ h_SBH[s, b]).view(n, D)]
            for s in range(length)
        ]
        k = [
            [prepare(x, parameters["key_norm.weight"], position[s]) for x in (w_k @ h_SBH[s, b]).view(g, D)]
            for s in range(length)
        ]
        v = [(w_v @ h_SBH[s, b]).view(g, D) for s in range(length)]
        for i in range(length):
            seen = [
                j
                for j in range(i + 1)
                if (window is None or i - j < window) and (document is None or document[i] == document[j])
            ]
            heads = []
            for head in range(n):
                group = head % g if mistake == "grouping" else head // (n // g)
                scores = torch.stack([q[i][head] @ k[j][group] for j in seen]) / math.sqrt(D)
                weights = scores.exp()
                bottom = weights.sum() + (parameters["sink"][head].exp() if spec.sink else 0.0)
                out = sum(weight * v[j][group] for weight, j in zip(weights, seen, strict=True)) / bottom
                if spec.gate and mistake != "no gate":
                    source = h_SBH[i, b] * 3.0 if mistake == "gate on un-normed input" else h_SBH[i, b]
                    out = out * torch.sigmoid(w_gate[head] @ source)
                heads.append(out)
            outputs.append(parameters["output_projection.weight"] @ torch.cat(heads))
    return torch.stack(outputs).view(batch, length, -1).transpose(0, 1)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "ragged"])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_reference(name: str, documents: Tensor | None) -> None:
    """Value and the gradients of the input and of every parameter, in float64."""
    spec, context = SPECS[name], context_of(documents)
    module = build(spec)
    h, d_output = inputs()
    h_ours = h.clone().requires_grad_()
    output = module(h_ours, context)
    output.backward(d_output)

    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    h_theirs = h.clone().requires_grad_()
    expected = reference(leaves, spec, h_theirs, context)
    expected.backward(d_output)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(h_ours.grad, h_theirs.grad, rtol=1e-12, atol=1e-12)
    for parameter_name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, leaves[parameter_name].grad, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    "name, mistake",
    [
        ("full", "rope before norm"),
        ("full", "full rotation"),
        ("full", "no scaling"),
        ("full", "interleaved rotation"),
        ("sliding", "grouping"),
        ("sliding", "gamma"),
        ("sliding", "window + 1"),
        ("sliding", "window - 1"),
        ("sliding", "no gate"),
        ("sliding", "gate on un-normed input"),
    ],
)
def test_a_mistake_would_be_seen(name: str, mistake: str) -> None:
    """The comparison above tells the module from one with this mistake, by a wide margin."""
    context = context_of(DOCUMENTS)
    module, (h, _) = build(SPECS[name]), inputs()
    with torch.no_grad():
        wrong = reference(dict(module.named_parameters()), SPECS[name], h, context, mistake)
        assert (module(h, context) - wrong).abs().max() > 1e-3


# ------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "sliding"])
def test_equals_transformers(layer: int) -> None:
    """The same weights in ``transformers``' Step-3.5 give the same output and gradients, in float32."""
    torch.manual_seed(3)
    window, length = 6, 40
    theirs = Step3p7TextModel(_transformers_config(window)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    attention = theirs.layers[layer].self_attn
    seen: dict[str, Any] = {}
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs | ({"hidden_states": args[0]} if args else {})), with_kwargs=True
    )
    theirs(input_ids=torch.randint(0, 32, (2, length)), use_cache=False)
    h_BSH = seen.pop("hidden_states").detach().requires_grad_()
    expected_BSH = attention(h_BSH, **seen)[0]
    d_output_BSH = torch.randn_like(expected_BSH)
    theirs.zero_grad()
    expected_BSH.backward(d_output_BSH)

    full = layer == 0
    spec = AttentionSpec(
        kind=AttentionKind.FULL if full else AttentionKind.SLIDING,
        num_heads=4 if full else 6,
        num_kv_groups=2,
        head_dim=16,
        window=None if full else window,
        rope=RopeSpec(5e6, 8, SCALING) if full else RopeSpec(1e4, 16, None),
        gate=True,
        sink=False,
    )
    module = SelfAttention(spec, 64, EPS, engine_config(torch.float32))
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.g_proj]
    with torch.no_grad():
        module.input_projection.weight.copy_(torch.cat([p.weight for p in projections]))
        module.query_norm.weight.copy_(attention.q_norm.weight)
        module.key_norm.weight.copy_(attention.k_norm.weight)
        module.output_projection.weight.copy_(attention.o_proj.weight)
    h_SBH = h_BSH.detach().transpose(0, 1).contiguous().requires_grad_()
    output_SBH = module(h_SBH, context_of(batch=2, length=length))
    output_SBH.backward(d_output_BSH.transpose(0, 1))

    torch.testing.assert_close(output_SBH.transpose(0, 1), expected_BSH, rtol=0, atol=1e-5)
    assert h_SBH.grad is not None and h_BSH.grad is not None
    pairs = [
        (h_SBH.grad.transpose(0, 1), h_BSH.grad),
        (module.input_projection.weight.grad, torch.cat([p.weight.grad for p in projections])),
        (module.query_norm.weight.grad, attention.q_norm.weight.grad),
        (module.key_norm.weight.grad, attention.k_norm.weight.grad),
        (module.output_projection.weight.grad, attention.o_proj.weight.grad),
    ]
    for actual, expected in pairs:
        assert relative_error(actual, expected) < 1e-5


def _transformers_config(window: int) -> Step3p7TextConfig:
    config = Step3p7TextConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=32,
        max_position_embeddings=128,
        num_attention_heads=4,
        num_attention_groups=2,
        head_dim=16,
        sliding_window=window,
        attention_other_setting=dict(
            attention_type="sliding_attention",
            num_attention_heads=6,
            num_attention_groups=2,
            head_dim=16,
            true_head_dim=16,
        ),
        layer_types=["full_attention", "sliding_attention"],
        rope_theta=[5e6, 1e4],
        partial_rotary_factors=[0.5, 1.0],
        rope_scaling=dict(
            rope_type="llama3",
            factor=2.0,
            original_max_position_embeddings=64,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
        ),
        yarn_only_types=["full_attention"],
        moe_layers_enum="1",
        use_moe=True,
        moe_num_experts=2,
        moe_top_k=1,
        moe_intermediate_size=16,
        share_expert_dim=16,
        use_head_wise_attn_gate=True,
        use_qk_norm=True,
        swiglu_limits=[0.0, 0.0],
        swiglu_limits_shared=[0.0, 0.0],
    )
    config._attn_implementation = "eager"
    return config


# ------------------------------------------------------------------------ contract with LayerSpec


@pytest.mark.parametrize("layout", ["S3F1+heads+gate", "S1F1+sink", "FFFF"])
def test_parameters_are_those_of_the_layer_spec(layout: str) -> None:
    for layer in model_spec(small_config(layout=layout)).layers:
        module = SelfAttention(layer.attention, layer.hidden_size, EPS, engine_config())
        ours = {f"{layer.prefix}.attention.{name}": tuple(p.shape) for name, p in module.named_parameters()}
        assert ours == _attention_shapes(layer)


def _attention_shapes(layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in layer.parameters() if p.name.startswith(f"{layer.prefix}.attention.")}


def test_heads_and_window_come_from_the_spec_alone() -> None:
    """Megatron's configuration says two heads of size 8 and knows no window; the layer has six and five."""
    config = engine_config()
    assert (config.num_attention_heads, config.window_size) == (2, None)
    module = SelfAttention(SLIDING, HIDDEN, EPS, config)
    assert module.input_projection.weight.shape == (6 * 8 + 2 * 16 + 6, HIDDEN)
    assert module.output_projection.weight.shape == (HIDDEN, 48)


def test_rope_tables_are_computed_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[RopeSpec] = []

    def counted(spec: RopeSpec, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        calls.append(spec)
        return rope_tables(spec, positions_BS, dtype)

    monkeypatch.setattr("steptron.model.attention.rope_tables", counted)
    context, (h, _) = context_of(), inputs()
    for spec in (FULL, SLIDING, FULL, SLIDING):
        build(spec)(h, context)
    assert calls == [FULL.rope, SLIDING.rope]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_narrower_dtypes_stay_near_float64(name: str, dtype: torch.dtype) -> None:
    """Output and gradients in the dtype of the parameters, off by its rounding only."""
    spec, context = SPECS[name], context_of(DOCUMENTS)
    narrow = build(spec, dtype=dtype)
    wide = build(spec)
    h, d_output = (x.to(dtype) for x in inputs())
    with torch.no_grad():
        for parameter, source in zip(wide.parameters(), narrow.parameters(), strict=True):
            parameter.copy_(source)
    output, exact = narrow(h, context), wide(h.double(), context)
    output.backward(d_output)
    exact.backward(d_output.double())
    tolerance = 2e-6 if dtype is torch.float32 else 3e-2
    assert output.dtype is dtype
    assert relative_error(output, exact) < tolerance
    for parameter, truth in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert parameter.grad is not None and truth.grad is not None and parameter.grad.dtype is dtype
        assert relative_error(parameter.grad, truth.grad) < tolerance


def test_can_be_built_without_memory() -> None:
    with torch.device("meta"):
        module = SelfAttention(replace(SLIDING, sink=True), 4096, EPS, engine_config(torch.bfloat16))
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in module.parameters())
