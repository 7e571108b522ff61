"""The whole released model, 804 tensors, against a list that is written out here; and who holds what of it.

Nothing of that size is in memory: shapes are read off the specs, the model on the meta device, and single ranks that
are built there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from steptron.checkpoint.released.names import ReleasedTensor, released_tensors
from steptron.config.checks import check, smallest_world_size
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.model.parameter_shards import MatrixShard
from steptron.planning.built import built_shapes
from steptron.planning.placement import HeldParameter, Placement, placement
from steptron.planning.rank import build_rank
from steptron.platform.distributed import shutdown
from tests.config.test_presets import model
from tests.planning.layouts import FLASH, long_context

Table = dict[str, tuple[tuple[int, ...], str]]

TENSORS = 804
PARAMETERS = 199_384_301_376
BYTES = 398_768_626_944
MAIN, EACH_DEPTH = 196_956_130_368, 809_390_336
DEPTHS = (45, 46, 47)


@cache
def table() -> Table:
    """Names, shapes and dtypes of the released checkpoint, from its description alone."""
    expected: Table = {"model.embed_tokens.weight": ((128896, 4096), "bf16")}
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        heads = 64 if layer in (0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44) else 96
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (4096,),
            "post_attention_layernorm.weight": (4096,),
            "self_attn.q_proj.weight": (heads * 128, 4096),
            "self_attn.k_proj.weight": (1024, 4096),
            "self_attn.v_proj.weight": (1024, 4096),
            "self_attn.g_proj.weight": (heads, 4096),
            "self_attn.o_proj.weight": (4096, heads * 128),
            "self_attn.q_norm.weight": (128,),
            "self_attn.k_norm.weight": (128,),
        }
        if 3 <= layer <= 44:
            shapes |= {
                "moe.gate.weight": (288, 4096),
                "moe.router_bias": (288,),
                "moe.gate_proj.weight": (288, 1280, 4096),
                "moe.up_proj.weight": (288, 1280, 4096),
                "moe.down_proj.weight": (288, 4096, 1280),
                "share_expert.gate_proj.weight": (1280, 4096),
                "share_expert.up_proj.weight": (1280, 4096),
                "share_expert.down_proj.weight": (4096, 1280),
            }
        else:
            shapes |= {
                "mlp.gate_proj.weight": (11264, 4096),
                "mlp.up_proj.weight": (11264, 4096),
                "mlp.down_proj.weight": (4096, 11264),
            }
        if layer in DEPTHS:
            shapes |= {
                "enorm.weight": (4096,),
                "hnorm.weight": (4096,),
                "eh_proj.weight": (4096, 8192),
                "transformer.shared_head.norm.weight": (4096,),
                "transformer.shared_head.output.weight": (128896, 4096),
            }
        for name, shape in shapes.items():
            expected[f"{prefix}.{name}"] = (shape, "fp32" if name == "moe.router_bias" else "bf16")
    return expected | {"model.norm.weight": ((4096,), "bf16"), "lm_head.weight": ((128896, 4096), "bf16")}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return model_spec(model("step3p5-flash", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tensors(spec: ModelSpec) -> list[ReleasedTensor]:
    return released_tensors(spec)


@pytest.fixture
def no_process_group() -> None:
    """Leaves the group of one that tests of the model keep in this process; they make it anew."""
    shutdown()


# --------------------------------------------------------------------------- names, shapes, figures


def test_names_shapes_and_dtypes(tensors: list[ReleasedTensor]) -> None:
    expected = table()
    found = {tensor.name: (tensor.shape, tensor.precision("bf16")) for tensor in tensors}
    assert len(tensors) == len(found) == len(expected) == TENSORS
    assert found == expected


def test_sizes(tensors: list[ReleasedTensor]) -> None:
    sizes = {name: math.prod(shape) for name, (shape, _) in table().items()}
    assert sum(sizes.values()) == PARAMETERS == MAIN + 3 * EACH_DEPTH
    for depth in DEPTHS:
        assert sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{depth}.")) == EACH_DEPTH
    element_bytes = {"bf16": 2, "fp32": 4}
    assert sum(size * element_bytes[table()[name][1]] for name, size in sizes.items()) == BYTES
    assert sum(tensor.num_bytes("bf16") for tensor in tensors) == BYTES
    assert sum(tensor.num_bytes("fp32") for tensor in tensors) == 4 * PARAMETERS


@pytest.mark.usefixtures("no_process_group")
def test_the_model_as_it_is_built_holds_them(tmp_path: Path, tensors: list[ReleasedTensor]) -> None:
    """Every released tensor is a run of rows of one parameter that is there, and together they are all its rows."""
    built = built_shapes(model("step3p5-flash", tmp_path))
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors:
        shape, (start, stop) = built[tensor.parameter.name], tensor.matrix.rows
        axis = 1 if len(shape) == 3 else 0
        assert 0 <= start < stop <= shape[axis], tensor.name
        assert (*shape[:axis], stop - start, *shape[axis + 1 :]) == table()[tensor.name][0], tensor.name
        rows[tensor.parameter.name].append((start, stop))
    assert rows.keys() == built.keys()
    for name, runs in rows.items():
        shape = built[name]
        assert_tiles(runs, shape[1 if len(shape) == 3 else 0], name)


def test_a_shared_head_is_every_depth_s(tmp_path: Path) -> None:
    """``model.mtp.head: shared``: the same names, the depths' output matrices being the main one."""
    own = model("step3p5-flash", tmp_path)
    shared = own.model_copy(update={"mtp": own.mtp.model_copy(update={"head": "shared"})})
    found = {tensor.name: tensor for tensor in released_tensors(model_spec(shared))}
    assert {name: tensor.shape for name, tensor in found.items()} == {n: shape for n, (shape, _) in table().items()}
    heads = [found[f"model.layers.{depth}.transformer.shared_head.output.weight"] for depth in DEPTHS]
    assert {tensor.matrix.name for tensor in heads} == {found["lm_head.weight"].matrix.name}


# ----------------------------------------------------------------------------------------- layouts

PLAIN = ["parallel.virtual_pipeline=1", "parallel.pipeline_layout=null"]
LAYOUTS = {
    "PP8 x VPP2, EP8 (the report's)": [],
    "PP8, EP8": [
        "parallel.virtual_pipeline=1",
        "parallel.pipeline_layout=Et*7|t*7|t*7|t*5|(t*6|)*3tmmmL",
    ],
    "PP4, TP4, EP16": [*PLAIN, "parallel.pipeline=4", "parallel.tensor=4", "parallel.expert=16"],
    "PP2, TP8, EP8": [*PLAIN, "parallel.pipeline=2", "parallel.tensor=8", "parallel.expert=8"],
    "PP2, TP2, CP4, EP8": [
        *PLAIN,
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "parallel.context=4",
        "parallel.expert=8",
    ],
    "PP1, EP32": [*PLAIN, "parallel.pipeline=1", "parallel.expert=32"],
    "one rank": [*PLAIN, "parallel.pipeline=1", "parallel.expert=1"],
}
LONG = "PP8 x VPP3, CP8, EP8 (128K)"

ROWS = ("q_proj", "k_proj", "v_proj", "g_proj", "mlp.gate_proj", "mlp.up_proj", "share_expert.gate_proj")
ROWS += ("share_expert.up_proj", "embed_tokens", "lm_head", "shared_head.output")
COLUMNS = ("o_proj", "mlp.down_proj", "share_expert.down_proj")
EXPERTS = ("moe.gate_proj", "moe.up_proj", "moe.down_proj")


@dataclass(frozen=True)
class Laid:
    """A model over the fewest ranks that a layout takes."""

    config: PretrainConfig
    place: Placement

    def cut(self, name: str) -> tuple[int, int]:
        """Axis along which a released tensor is cut, and into how many parts."""
        stem = name.removesuffix(".weight")
        if stem.endswith(EXPERTS):
            return 0, self.place.expert
        if stem.endswith(ROWS):
            return 0, self.place.tensor
        return (1, self.place.tensor) if stem.endswith(COLUMNS) else (0, 1)


@pytest.fixture(scope="module", params=[*LAYOUTS, LONG])
def laid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laid:
    name = request.param
    config = long_context(tmp_path_factory.mktemp("long")) if name == LONG else load(FLASH, LAYOUTS[name]).config
    world_size = smallest_world_size(config.parallel)
    check(config, world_size, "cuda")
    return Laid(config, placement(config, world_size))


def test_every_tensor_has_one_set_of_owners(laid: Laid, tensors: list[ReleasedTensor]) -> None:
    """Over all ranks, the distinct parts of a tensor fill it without a gap or an overlap, on one pipeline rank, each
    on the ranks that should have it and on no other. The embedding that the last stage holds for MTP is a copy."""
    place = laid.place
    holders: dict[tuple[str, bool], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(place.world_size):
        for held in place.held(rank):
            for part in held.shard.matrices:
                assert_fits(held, part)
                holders[part.matrix.name, held.is_copy][part.range].append(rank)
    for tensor in tensors:
        parts = holders.pop((tensor.matrix.name, False))
        axis, count = laid.cut(tensor.name)
        assert len(parts) == count, tensor.name
        assert_tiles(list(parts), tensor.shape[axis], tensor.name)
        assert {start % (tensor.shape[axis] // count) for start, _ in parts} == {0}, tensor.name  # equal parts
        stages = {rank // place.stage_size for ranks in parts.values() for rank in ranks}
        assert len(stages) == 1, f"{tensor.name} is on pipeline ranks {stages}"
        (stage,) = stages
        for index, run in enumerate(sorted(parts)):
            expected = [rank for rank in ranks_of(place, stage) if part_of(place, rank, tensor.name) == index % count]
            assert parts[run] == expected, f"{tensor.name} {run}"
    copies = {} if place.pipeline == 1 else {("embedding.weight", True)}
    assert holders.keys() == set(copies)


def ranks_of(place: Placement, pipeline_rank: int) -> range:
    return range(pipeline_rank * place.stage_size, (pipeline_rank + 1) * place.stage_size)


def part_of(place: Placement, rank: int, name: str) -> int:
    """Which part of a tensor a rank of its stage holds, from the rank's number alone."""
    stem = name.removesuffix(".weight")
    if stem.endswith(EXPERTS):
        return rank % place.expert
    return rank % place.tensor if stem.endswith(ROWS + COLUMNS) else 0


def assert_fits(held: HeldParameter, part: MatrixShard) -> None:
    """The part's run is what the rank's own tensor has room for."""
    length, rows = part.range[1] - part.range[0], part.rows[1] - part.rows[0]
    whole_rows = part.matrix.rows[1] - part.matrix.rows[0]
    if held.shard.parameter.is_expert:
        assert (length, rows) == (held.shard.shape[0], whole_rows), held.name
    elif part.axis == 1:
        assert (length, rows) == (held.shard.shape[1], whole_rows), held.name
    else:
        assert length == rows, held.name


def assert_tiles(runs: list[tuple[int, int]], extent: int, name: str) -> None:
    end = 0
    for start, stop in sorted(runs):
        assert start == end < stop, f"{name}: {sorted(runs)}"
        end = stop
    assert end == extent, f"{name}: {end} of {extent}"


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_what_is_really_built_is_what_the_owners_hold(laid: Laid, where: str, tensors: list[ReleasedTensor]) -> None:
    """The released tensors' parts on a rank fill every parameter that the rank builds, but for nothing."""
    place = laid.place
    rank = {"first": 0, "middle": place.world_size // 2, "last": place.world_size - 1}[where]
    built = build_rank(laid.config, place.world_size, rank)
    shapes = {(chunk, name): shape for chunk, part in enumerate(built.chunks) for name, shape in part.shapes.items()}
    names = {tensor.matrix.name: tensor for tensor in tensors}
    assert shapes.keys() == {(held.chunk, held.name) for held in place.held(rank)}
    for held in place.held(rank):
        shape = shapes[held.chunk, held.name]
        size = sum(released_size(names[part.matrix.name], part, laid) for part in held.shard.matrices)
        assert size == math.prod(shape), held.name
        assert_tiles([part.rows for part in held.shard.matrices], shape[1 if len(shape) == 3 else 0], held.name)


def released_size(tensor: ReleasedTensor, part: MatrixShard, laid: Laid) -> int:
    """Numbers of a released tensor in a part, from the table's shape."""
    axis, _ = laid.cut(tensor.name)
    shape, _ = table()[tensor.name]
    return math.prod((*shape[:axis], part.range[1] - part.range[0], *shape[axis + 1 :]))


@pytest.mark.parametrize(
    "runs", [[(0, 4)], [(0, 4), (5, 8)], [(0, 5), (4, 8)], [(0, 4), (4, 8), (4, 8)], [(0, 4), (4, 9)], []]
)
def test_a_gap_and_an_overlap_would_show(runs: list[tuple[int, int]]) -> None:
    assert_tiles([(4, 8), (0, 4)], 8, "x")
    with pytest.raises(AssertionError):
        assert_tiles(runs, 8, "x")


def test_a_vocabulary_that_does_not_divide() -> None:
    """128,897 rows over 8 ranks: 16,113 each, 16,106 on the last one; its padding belongs to no tensor."""
    config = load(FLASH, [*LAYOUTS["PP2, TP8, EP8"], "model.vocab_size=128897"]).config
    place = placement(config, 16)
    for name, ranks in (
        ("embedding.weight", range(8)),
        ("head.weight", range(8, 16)),
        ("mtp.2.head.weight", range(8, 16)),
    ):
        parts = [next(held for held in place.held(rank) if held.name == name).shard for rank in ranks]
        assert {part.shape for part in parts} == {(16113, 4096)}
        runs = [part.matrices[0].range for part in parts]
        assert_tiles(runs, 128897, name)
        assert [stop - start for start, stop in runs] == [16113] * 7 + [16106]
