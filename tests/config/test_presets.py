from __future__ import annotations

from pathlib import Path

import pytest

from steptron.config.batch_schedule import BatchSchedule
from steptron.config.checks import check, check_stages, data_parallel_size
from steptron.config.loader import load
from steptron.config.schema import ModelConfig, PretrainConfig
from steptron.model.layer_spec import AttentionKind, DenseFfnSpec, MoeFfnSpec, RopeScaling, model_spec
from steptron.model.stages import split_stages
from tests.config.samples import MINIMAL, write

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ["nano", "tiny", "step3p5-flash"]


def preset(name: str, *overrides: str) -> PretrainConfig:
    return load(CONFIGS / "pretrain" / f"{name}.yaml", overrides).config


def model(name: str, folder: Path) -> ModelConfig:
    """The model section of ``configs/model/<name>.yaml`` alone."""
    rest = write(folder, "rest.yaml", MINIMAL[MINIMAL.index("data:") :])
    return load(write(folder, "run.yaml", f"base: [{rest}, {CONFIGS / 'model' / name}.yaml]")).config.model


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("nano", 1), ("nano", 8), ("tiny-quickstart", 2), ("step3p5-flash", 64), ("tiny-curriculum", 1)],
)
def test_runs_are_accepted(name: str, world_size: int) -> None:
    check_stages(load(CONFIGS / "pretrain" / f"{name}.yaml").curriculum, world_size, "cpu")


def test_every_run_is_tested() -> None:
    assert {file.stem for file in (CONFIGS / "pretrain").glob("*.yaml")} == {
        *("nano", "tiny-quickstart", "tiny-curriculum", "step3p5-flash")
    }
    assert {file.stem for file in (CONFIGS / "model").glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("parallel", ["single", "ep2", "pp2"])
def test_nano_takes_every_small_layout(parallel: str, tmp_path: Path) -> None:
    text = f"base: [{CONFIGS}/pretrain/nano.yaml, {CONFIGS}/parallel/{parallel}.yaml]"
    check(load(write(tmp_path, "run.yaml", text)).config, {"single": 1, "ep2": 2, "pp2": 2}[parallel], "cpu")


@pytest.mark.parametrize(("name", "context"), [("report", 1), ("long-context", 8)])
def test_layouts_of_4096_ranks(name: str, context: int, tmp_path: Path) -> None:
    """Every data-parallel rank gets as many micro-batches as the interleaved schedule takes at once, or a multiple,
    from the first step of the batch ramp on."""
    text = f"base: [{CONFIGS}/pretrain/step3p5-flash.yaml, {CONFIGS}/parallel/{name}.yaml]"
    config = load(write(tmp_path, "run.yaml", text)).config
    check(config, 4096, "cuda")
    parallel = config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.expert, parallel.context) == (1, 8, 8, context)
    ranks = data_parallel_size(parallel, 4096)
    assert ranks == 512 // context
    for size in BatchSchedule(config.train).sizes:
        assert size % (ranks * config.train.micro_batch_size * parallel.pipeline) == 0
    stages = split_stages(45, 8 * parallel.virtual_pipeline, parallel.pipeline_layout)
    assert parallel.virtual_pipeline > 1 and sum(len(stage.layers) for stage in stages) == 45


def test_the_reports_stages_suit_4096_ranks(tmp_path: Path) -> None:
    """The 4K stages under the report's layout, all of them with context parallelism."""
    flash = CONFIGS / "pretrain" / "step3p5-flash.yaml"
    check_stages(load(flash).curriculum.through("anneal-4k"), 4096, "cuda")
    text = f"base: [{flash}, {CONFIGS}/parallel/long-context.yaml]"
    check_stages(load(write(tmp_path, "run.yaml", text)).curriculum, 4096, "cuda")


def test_every_layout_is_tested() -> None:
    names = {file.stem for file in (CONFIGS / "parallel").glob("*.yaml")}
    assert names == {"single", "ep2", "pp2", "report", "long-context"}


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("pipeline=2", 2), ("expert=2", 2), ("expert=4", 4), ("pipeline=1", 2), ("pipeline=4", 4)],
)
def test_nano_takes_the_layouts_of_the_parallel_tests(layout: str, world_size: int) -> None:
    check(preset("nano", f"parallel.{layout}"), world_size, "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_every_feature(name: str, tmp_path: Path) -> None:
    config = model(name, tmp_path)
    spec = model_spec(config)
    kinds = [layer.attention.kind for layer in spec.layers]
    assert kinds == [AttentionKind.SLIDING if index % 4 else AttentionKind.FULL for index in range(len(kinds))]
    assert all(layer.attention.gate and not layer.attention.sink for layer in spec.layers)
    assert config.sliding.num_heads == 1.5 * config.full.num_heads
    assert config.full.rope.rotary_fraction == 0.5
    assert isinstance(spec.layers[0].ffn, DenseFfnSpec) and isinstance(spec.layers[-1].ffn, MoeFfnSpec)
    assert set(config.clamp.routed) == {config.num_layers - 2, config.num_layers - 1}
    assert set(config.clamp.shared) == {config.num_layers - 1}
    assert config.clamp.position == "after_silu" and config.moe.scaling_factor == 3.0
    assert (config.mtp.chain, config.mtp.head) == ("pre_norm", "own")
    assert all(depth.layer.attention.kind is AttentionKind.SLIDING for depth in spec.mtp)
    # Rows of a multiple of 16 bytes in bf16 too.
    assert config.hidden_size % 8 == 0 and config.moe.expert_hidden_size % 8 == 0


def test_sizes(tmp_path: Path) -> None:
    nano, tiny = model("nano", tmp_path), model("tiny", tmp_path)
    assert (nano.num_layers, nano.mtp.depths, nano.hidden_size, nano.moe.num_experts, nano.moe.top_k) == (
        9,
        1,
        64,
        8,
        2,
    )
    assert (tiny.num_layers, tiny.mtp.depths, tiny.hidden_size, tiny.moe.num_experts, tiny.moe.top_k) == (
        9,
        3,
        256,
        32,
        4,
    )
    spec = model_spec(tiny)
    assert sum(parameter.size for parameter in spec.main_parameters()) == 20_821_568
    assert [sum(parameter.size for parameter in depth.parameters()) for depth in spec.mtp] == [1_954_112] * 3


def test_flash_has_the_released_number_of_parameters(tmp_path: Path) -> None:
    spec = model_spec(model("step3p5-flash", tmp_path))
    assert sum(parameter.size for parameter in spec.main_parameters()) == 196_956_130_368
    assert [sum(parameter.size for parameter in depth.parameters()) for depth in spec.mtp] == [809_390_336] * 3


def test_flash_is_the_released_configuration(tmp_path: Path) -> None:
    """The per-layer arrays of the release's config.json (48 entries: 45 layers and 3 MTP depths)."""
    spec = model_spec(model("step3p5-flash", tmp_path))
    layers = [*spec.layers, *(depth.layer for depth in spec.mtp)]
    assert (spec.vocab_size, spec.hidden_size, spec.norm_eps, len(layers)) == (128896, 4096, 1e-5, 48)
    full = [True, False, False, False] * 12
    assert [layer.attention.kind is AttentionKind.FULL for layer in layers] == full
    assert [layer.attention.num_heads for layer in layers] == [64 if kind else 96 for kind in full]
    assert {(layer.attention.num_kv_groups, layer.attention.head_dim) for layer in layers} == {(8, 128)}
    assert [layer.attention.window for layer in layers] == [None if kind else 512 for kind in full]
    assert [layer.attention.rope.theta for layer in layers] == [5e6 if kind else 1e4 for kind in full]
    assert [layer.attention.rope.rotary_dim for layer in layers] == [64 if kind else 128 for kind in full]
    scaling = RopeScaling(factor=2.0, low_freq_factor=1.0, high_freq_factor=32.0, original_length=131072)
    assert [layer.attention.rope.scaling for layer in layers] == [scaling if kind else None for kind in full]
    routed, shared = {}, {}
    for number, layer in enumerate(layers):
        if isinstance(layer.ffn, MoeFfnSpec):
            assert 3 <= number <= 44
            assert (layer.ffn.num_experts, layer.ffn.top_k, layer.ffn.scaling_factor) == (288, 8, 3.0)
            assert (layer.ffn.expert_hidden_size, layer.ffn.shared.hidden_size) == (1280, 1280)
            routed[number], shared[number] = layer.ffn.expert_clamp, layer.ffn.shared.clamp
            assert layer.ffn.clamp_after_silu
        else:
            assert number < 3 or number > 44
            assert (layer.ffn.hidden_size, layer.ffn.clamp) == (11264, None)
    assert {number: limit for number, limit in routed.items() if limit} == {43: 7.0, 44: 7.0}
    assert {number: limit for number, limit in shared.items() if limit} == {44: 16.0}


def test_flash_run_follows_the_report() -> None:
    config = preset("step3p5-flash")
    assert config.model.full.rope.theta == 1e4 and config.model.full.rope.scaling is None
    ramp = BatchSchedule(config.train)
    assert ramp.sizes == (4096, 8192, 12288, 16384)
    tokens = ramp.consumed_after(config.train.steps) * config.data.sequence_length
    assert tokens == pytest.approx(14.6e12, rel=1e-5)
    assert ramp.consumed_after(7947 + 3974 + 2649) * config.data.sequence_length == pytest.approx(400e9, rel=1e-3)
    assert config.loss.mtp_train_depths == 1
