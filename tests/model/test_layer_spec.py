"""LayerSpec: the layout string, and that the model is what the specs say."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.config.schema import (
    AttentionConfig,
    ModelConfig,
    MtpConfig,
    ParallelConfig,
    RopeConfig,
    SlidingAttentionConfig,
)
from steptron.model.assembly import StepModel
from steptron.model.layer_spec import AttentionKind, LayerRole, MoeFfnSpec, ParameterRole, model_spec, parse_layout
from steptron.model.stages import Stage
from steptron.model.transformer_config import transformer_config
from tests.model.helpers import build_model, fill, random_batch, single_process, small_config
from tests.planning.models import flash

FULL, SLIDING = AttentionKind.FULL, AttentionKind.SLIDING
LAYOUTS = [
    "FFFF",
    "S1F1",
    "S3F1",
    "S3F1+heads",
    "S3F1+gate",
    "S3F1+sink",
    "S3F1+heads+gate",
    "S3F1+heads+sink",
    "S3F1+heads+gate+sink",
]


@pytest.mark.parametrize(
    "layout, pattern, options",
    [
        ("F", [FULL], set()),
        ("FFFF", [FULL], set()),
        ("S1F1", [SLIDING, FULL], set()),
        ("S3F1", [SLIDING] * 3 + [FULL], set()),
        ("S2F2+gate", [SLIDING] * 2 + [FULL] * 2, {"gate"}),
        ("S10F1+sink", [SLIDING] * 10 + [FULL], {"sink"}),
        ("S3F1+heads+gate", [SLIDING] * 3 + [FULL], {"heads", "gate"}),
        ("S3F1+sink+gate+heads", [SLIDING] * 3 + [FULL], {"heads", "gate", "sink"}),
    ],
)
def test_layout_strings(layout: str, pattern: list[AttentionKind], options: set[str]) -> None:
    assert parse_layout(layout) == (tuple(pattern), frozenset(options))


@pytest.mark.parametrize(
    "layout, part",
    [
        ("", "expected FFFF, S1F1 or S3F1"),
        ("S3", "expected FFFF"),
        ("F1S3", "expected FFFF"),
        ("s3f1", "expected FFFF"),
        ("S3F1+", "expected FFFF"),
        ("S3F1 +gate", "expected FFFF"),
        ("S3F1+gates", "followed by any of +heads, +gate, +sink"),
        ("+gate", "expected FFFF"),
        ("S3F1\n", "expected FFFF"),
        ("S3F1+gate+gate", "names an option twice"),
        ("S0F1", "counts must be at least 1"),
        ("S3F0", "counts must be at least 1"),
    ],
)
def test_layout_strings_that_are_refused(layout: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layout(layout)
    assert repr(layout) in str(caught.value) and part in str(caught.value)


@pytest.mark.parametrize(
    "layout, full_layers",
    [("FFFF", range(10)), ("S1F1", [0, 2, 4, 6, 8]), ("S3F1", [0, 4, 8]), ("S2F2", [0, 3, 4, 7, 8])],
)
def test_one_full_layer_leads_and_the_pattern_follows(layout: str, full_layers: list[int]) -> None:
    spec = model_spec(small_config(num_layers=10, layout=layout, clamp={}))
    assert [layer.index for layer in spec.layers if layer.attention.kind is FULL] == list(full_layers)
    assert [layer.index for layer in spec.layers] == list(range(10))
    assert {depth.layer.attention.kind for depth in spec.mtp} == {SLIDING}


def test_heads_option_gives_sliding_layers_their_own_head_count() -> None:
    with_heads, without = (model_spec(small_config(layout=layout)) for layout in ("S3F1+heads", "S3F1"))
    assert [layer.attention.num_heads for layer in with_heads.layers] == [2, 4, 4, 4, 2]
    assert [layer.attention.num_heads for layer in without.layers] == [2] * 5
    assert with_heads.mtp[0].layer.attention.num_heads == 4 and without.mtp[0].layer.attention.num_heads == 2


def test_rope_window_and_role_by_kind() -> None:
    spec = model_spec(small_config())
    for layer in [*spec.layers, *(depth.layer for depth in spec.mtp)]:
        attention = layer.attention
        if attention.kind is FULL:
            assert (attention.rope.theta, attention.rope.rotary_dim, attention.window) == (5e6, 4, None)
            assert attention.rope.scaling is not None and attention.rope.scaling.original_length == 16
            assert (attention.rope.scaling.low_freq_factor, attention.rope.scaling.high_freq_factor) == (1, 32)
        else:
            assert (attention.rope.theta, attention.rope.rotary_dim, attention.window) == (1e4, 8, 4)
            assert attention.rope.scaling is None
    assert {layer.role for layer in spec.layers} == {LayerRole.DECODER}
    assert {depth.layer.role for depth in spec.mtp} == {LayerRole.MTP}
    assert [layer.index for layer in spec.moe_layers] == [1, 2, 3, 4]


def test_bad_shapes_are_refused_by_name() -> None:
    rope = RopeConfig(theta=1e4)
    odd = RopeConfig(theta=1e4, rotary_fraction=0.375)  # 3 of 8
    for changes, part in [
        ({"full": AttentionConfig(num_heads=2, num_kv_groups=2, rope=odd)}, "model.full.rope.rotary_fraction"),
        ({"full": AttentionConfig(num_heads=3, num_kv_groups=2, rope=rope)}, "model.full.num_heads (3)"),
        (
            {"sliding": SlidingAttentionConfig(num_heads=5, num_kv_groups=2, window=4, rope=rope)},
            "model.sliding.num_heads (5)",
        ),
    ]:
        with pytest.raises(ValueError) as caught:
            model_spec(small_config(**changes))
        assert part in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["own", "shared"])
def test_names_are_unique_and_slices_tile_their_parameter(layout: str, head: str) -> None:
    spec = model_spec(small_config(layout=layout, mtp=MtpConfig(depths=2, head=head)))
    parameters = spec.parameters()
    names = [parameter.name for parameter in parameters]
    matrices = [matrix.name for parameter in parameters for matrix in parameter.matrices]
    assert len(set(names)) == len(names) and len(set(matrices)) == len(matrices)
    for parameter in parameters:
        row = 0
        for matrix in parameter.matrices:
            assert matrix.rows[0] == row < matrix.rows[1]
            row = matrix.rows[1]
        assert row == parameter.shape[1 if parameter.is_expert else 0]
        assert parameter.size == math.prod(parameter.shape)
        assert (
            len(
                {
                    matrix.role in {r for r in ParameterRole if r.value.startswith("expert_")}
                    for matrix in parameter.matrices
                }
            )
            == 1
        )


def test_logical_matrices_are_the_tensors_of_the_released_checkpoint() -> None:
    """804 tensors (facts of the release, section 3): fused parameters hold what the release stores apart."""
    spec = model_spec(flash())
    assert sum(len(parameter.matrices) for parameter in spec.parameters()) == 804


# ---------------------------------------------------------------------------------- the model


def shapes_of_specs(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in model_spec(config).parameters()}


VARIANTS: dict[str, ModelConfig] = {
    **{layout: small_config(layout=layout) for layout in LAYOUTS},
    "no MTP": small_config(mtp=MtpConfig()),
    "shared head": small_config(mtp=MtpConfig(depths=2, head="shared")),
    "post-norm chain": small_config(mtp=MtpConfig(depths=3, chain="post_norm")),
    "all dense": small_config(num_dense_layers=5, clamp={"shared": {0: 1.0}}),
    "all MoE": small_config(num_dense_layers=0),
    "clamp before SiLU": small_config(clamp={"routed": {1: 0.5}, "shared": {0: 0.5}, "position": "before_silu"}),
    "one layer": small_config(num_layers=1, num_dense_layers=0, clamp={}),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_model_has_the_tensors_of_its_specs_and_runs(config: ModelConfig) -> None:
    model = build_model(config)
    tensors = dict(model.logical_tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes_of_specs(config)
    untrained = {name for name, tensor in tensors.items() if not tensor.requires_grad}
    assert untrained == {p.name for p in model.spec.parameters() if p.role is ParameterRole.ROUTER_BIAS}

    fill(model, seed=0)
    sums = model(random_batch(config.vocab_size, 2, 12, seed=1))
    assert sums.shape == (1 + config.mtp.depths,) and sums.isfinite().all()
    sums.sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    zero = [name for name, p in model.named_parameters() if torch.count_nonzero(p.grad) == 0]
    assert zero == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_tensors_have_the_shapes_of_the_specs(layout: str) -> None:
    config = flash(layout if layout != "FFFF" else "FFFF", num_layers=6, clamp={}, mtp={"depths": 1})
    spec, engine = model_spec(config), transformer_config(config, ParallelConfig(), torch.bfloat16)
    with torch.device("meta"):
        model = StepModel(spec, Stage.whole(len(spec.layers)), engine, single_process().groups)
    tensors = dict(model.logical_tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes_of_specs(config)
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    biases = {p.name for p in model_spec(config).parameters() if p.role is ParameterRole.ROUTER_BIAS}
    assert {dtypes[name] for name in biases} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in biases} == {torch.bfloat16}


def test_only_layers_with_experts_have_a_router() -> None:
    model = build_model(small_config())
    assert list(model.routers()) == [1, 2, 3, 4]
    assert all(isinstance(model.spec.layers[index].ffn, MoeFfnSpec) for index in model.routers())
