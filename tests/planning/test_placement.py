"""Who holds what, counted for every rank and against expectations from rank numbers alone."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest

from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import ParameterRole
from steptron.model.parameter_shards import Cut, cut_of
from steptron.planning.placement import Coordinates, HeldParameter, Placement, placement
from tests.planning.layouts import RELEASED_SIZE, WORLD_SIZE, long_context, report

STAGE_SIZE = 512  # ranks of each of 8 pipeline ranks
EXPERT_RANKS = 8
# Layers of pipeline rank 0 to 7 in the report's preset: chunk 0, then chunk 1.
LAYERS = [
    [0, 1, 2, 21, 22],
    [3, 4, 5, 23, 24, 25],
    [6, 7, 8, 26, 27, 28, 29],
    [9, 10, 11, 30, 31, 32, 33],
    [12, 13, 14, 34, 35, 36, 37],
    [15, 16, 38, 39, 40],
    [17, 18, 41, 42, 43, 44],
    [19, 20],
]


@pytest.fixture(scope="module", params=["report", "long context"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Placement:
    config = report() if request.param == "report" else long_context(tmp_path_factory.mktemp("long"))
    return placement(config, WORLD_SIZE)


def test_every_part_has_exactly_its_owners(place: Placement) -> None:
    """Over all ranks: each part of a parameter is on every rank that should hold it, and on no other."""
    holders: dict[tuple[str, bool, int, int], list[int]] = defaultdict(list)
    for rank in range(WORLD_SIZE):
        for held in place.held(rank):
            (part,) = {(matrix.index, matrix.count) for matrix in held.shard.matrices}
            holders[held.name, held.is_copy, *part].append(rank)
    seen: dict[tuple[str, bool], set[int]] = defaultdict(set)
    for (name, is_copy, index, count), ranks in holders.items():
        stage = ranks[0] // STAGE_SIZE
        whole_stage = range(stage * STAGE_SIZE, (stage + 1) * STAGE_SIZE)
        is_expert = ".experts." in name
        assert ranks == [rank for rank in whole_stage if not is_expert or rank % EXPERT_RANKS == index], name
        assert count == (EXPERT_RANKS if is_expert else 1)
        seen[name, is_copy].add(index)
    assert all(parts == set(range(8 if ".experts." in name else 1)) for (name, _), parts in seen.items())
    names = {name for name, is_copy in seen if not is_copy}
    assert names == {parameter.name for parameter in place.spec.parameters()}
    assert [name for name, is_copy in seen if is_copy] == ["embedding.weight"]


def test_the_sum_over_all_ranks_is_the_released_size(place: Placement) -> None:
    assert place.size_over_ranks() == RELEASED_SIZE


@pytest.mark.parametrize("rank", [0, 1, 511, 512, 2050, 4095])
def test_owners_of_a_rank(place: Placement, rank: int) -> None:
    stage = [other for other in range(WORLD_SIZE) if other // STAGE_SIZE == rank // STAGE_SIZE]
    for held in place.held(rank):
        expected = [other for other in stage if other % EXPERT_RANKS == rank % EXPERT_RANKS]
        assert list(place.owners(held, rank)) == (expected if ".experts." in held.name else stage)


def test_layers_of_the_report_s_layout() -> None:
    place = placement(report(), WORLD_SIZE)
    for pipeline_rank, layers in enumerate(LAYERS):
        held = place.held(pipeline_rank * STAGE_SIZE)
        assert [layer for stage in place.chunks(pipeline_rank) for layer in stage.layers] == layers
        of_layers = {int(part.name.split(".")[1]) for part in held if part.name.startswith("layers.")}
        assert of_layers == set(layers)
    first, last = place.held(0), place.held(7 * STAGE_SIZE)
    assert [part.chunk for part in first if part.name == "embedding.weight"] == [0]
    assert [(part.chunk, part.is_copy) for part in last if part.name == "embedding.weight"] == [(1, True)]
    assert {part.name.split(".")[0] for part in last} == {"embedding", "layers", "final_norm", "head", "mtp"}


def test_two_layouts_over_the_same_ranks() -> None:
    """TP2 x CP2 x DP2 for attention, EP4 x expert-DP2 for experts, in each of two pipeline ranks of 8."""
    place = of_sizes(report(), world_size=16, pipeline=2, tensor=2, context=2, expert=4)
    assert (place.data, place.expert_data, place.stage_size) == (2, 2, 8)
    assert place.coordinates(13) == Coordinates(pipeline=1, tensor=1, context=0, data=1, expert=1, expert_data=1)
    assert place.groups(13) == {
        "pp": (5, 13),
        "tp": (12, 13),
        "cp": (13, 15),
        "dp": (9, 13),
        "dp_cp": (9, 11, 13, 15),
        "tp_dp_cp": (8, 9, 10, 11, 12, 13, 14, 15),
        "ep": (12, 13, 14, 15),
        "expt_dp": (9, 13),
    }
    owners = {
        Cut.ROWS: (9, 11, 13, 15),
        Cut.COLUMNS: (9, 11, 13, 15),
        Cut.EXPERTS: (9, 13),
        Cut.NONE: tuple(range(8, 16)),
    }
    found = {cut_of(part.shard.parameter.role): place.owners(part, 13) for part in place.held(13)}
    assert found == owners


@pytest.mark.parametrize(("tensor", "context", "expert"), [(1, 1, 1), (2, 1, 2), (2, 2, 8), (8, 1, 4), (1, 4, 2)])
def test_the_sum_is_exact_however_parameters_are_cut(tensor: int, context: int, expert: int) -> None:
    place = of_sizes(report(), world_size=64, pipeline=2, tensor=tensor, context=context, expert=expert)
    assert place.size_over_ranks() == RELEASED_SIZE


def test_a_part_that_is_counted_twice_would_show() -> None:
    """The embedding's copy, were it counted, would make the sum too large by the embedding."""
    place = of_sizes(report(), world_size=64, pipeline=2, tensor=2, context=1, expert=8)
    copies = [part for rank in range(64) for part in place.held(rank) if part.is_copy]
    assert len(copies) == 32 and {part.shard.shape for part in copies} == {(128896 // 2, 4096)}
    embedding = next(p for p in place.spec.parameters() if p.role is ParameterRole.EMBEDDING)
    with_copies = _Miscounting(**{field.name: getattr(place, field.name) for field in dataclasses.fields(place)})
    assert with_copies.size_over_ranks() == RELEASED_SIZE + embedding.size


class _Miscounting(Placement):
    def held(self, rank: int) -> tuple[HeldParameter, ...]:
        return tuple(dataclasses.replace(part, is_copy=False) for part in super().held(rank))


def test_without_mtp_in_training_there_is_no_copy(tmp_path: Path) -> None:
    config = report()
    idle = config.model_copy(update={"loss": config.loss.model_copy(update={"mtp_train_depths": 0})})
    assert not any(part.is_copy for part in placement(idle, WORLD_SIZE).held(4095))


def test_unknown_rank() -> None:
    place = placement(report(), WORLD_SIZE)
    with pytest.raises(ValueError, match="rank 4096: the 4,096 ranks are numbered 0 to 4095"):
        place.coordinates(4096)


def of_sizes(
    config: PretrainConfig, world_size: int, pipeline: int, tensor: int, context: int, expert: int
) -> Placement:
    """The model of a configuration in another layout, without interleaving."""
    sizes = dict(
        pipeline=pipeline, virtual_pipeline=1, pipeline_layout=None, tensor=tensor, context=context, expert=expert
    )
    parallel = config.parallel.model_copy(update=sizes)
    return placement(config.model_copy(update={"parallel": parallel}), world_size)
