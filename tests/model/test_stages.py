"""Splitting layers into pipeline stages, and stages into the chunks of pipeline ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from steptron.config.pipeline_layout import parse_pipeline_layout
from steptron.model.stages import Stage, chunks_of, split_stages


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_hold_every_layer_once_in_order_and_as_evenly_as_possible(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ValueError) as caught:
            split_stages(num_layers, num_stages)
        assert f"{num_stages} pipeline stages" in str(caught.value) and f"there are {num_layers}" in str(caught.value)
        return
    stages = split_stages(num_layers, num_stages)
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


def test_the_whole_model_is_one_stage() -> None:
    assert split_stages(9, 1) == [Stage.whole(9)] == [Stage(tuple(range(9)), True, True)]


def test_flash_on_eight_stages() -> None:
    assert [len(stage.layers) for stage in split_stages(45, 8)] == [6, 6, 6, 6, 6, 5, 5, 5]


def test_a_layout_says_what_a_stage_holds() -> None:
    assert split_stages(5, 4, "Et*3||tt|mL") == [
        Stage((0, 1, 2), True, False),
        Stage((), False, False),
        Stage((3, 4), False, False),
        Stage((), False, True),
    ]


def test_a_layout_of_other_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 4 of t, but model\.num_layers is 5"):
        split_stages(5, 2, "Ett|ttL")


def test_a_layout_allows_more_stages_than_layers() -> None:
    assert [stage.layers for stage in split_stages(1, 4, "E||t|L")] == [(), (), (0,), ()]


def test_stage_s_is_chunk_s_over_p_of_rank_s_modulo_p() -> None:
    stages = split_stages(9, 6)
    held = [chunks_of(stages, rank, 3) for rank in range(3)]
    assert held == [[stages[0], stages[3]], [stages[1], stages[4]], [stages[2], stages[5]]]
    for index, stage in enumerate(stages):
        assert held[index % 3][index // 3] is stage
    with pytest.raises(ValueError, match="6 stages cannot be shared equally by 4 pipeline ranks"):
        chunks_of(stages, 0, 4)


# Layers, MTP depths, pipeline, virtual pipeline, layout.
LAYOUTS = {
    "flash, 45 + 3 on 8 x 3": (45, 3, 8, 3, "E|(t*2|)*21t*2|tmmmL"),
    "flash, light ends": (45, 3, 8, 3, "Et|(t*2|)*21,t|t,m*3,L"),
    "flash, loss alone, empty stages": (45, 3, 8, 3, "E|(t*3|)*14t*3||||||||mmmL"),
    "flash without interleaving": (45, 3, 8, 1, "Et*6|(t*6|)*5t*6|t*3m*3L"),
    "nano on 4 x 2": (9, 1, 4, 2, "Et|t|tt|t|t|t|t|tmL"),
    "no MTP": (5, 0, 2, 2, "Ett|t||ttL"),
    "repeats of stages": (9, 1, 2, 3, "Et|(t|tt|)*2ttmL"),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_megatron_reads_the_same_stages(case: tuple[int, int, int, int, str]) -> None:
    num_layers, depths, pipeline, virtual, layout = case
    theirs = PipelineParallelLayerLayout(layout, pipeline)
    theirs.validate_layer_layout(num_layers, depths)
    assert theirs.virtual_pipeline_model_parallel_size == virtual
    stages = split_stages(num_layers, pipeline * virtual, layout)
    contents = parse_pipeline_layout(layout, pipeline * virtual, num_layers, depths)
    for rank in range(pipeline):
        for chunk, stage in enumerate(chunks_of(stages, rank, pipeline)):
            kinds = theirs.layout[rank][chunk]
            offset = sum(
                theirs.layout[r][c].count(LayerType.decoder)
                for c in range(chunk + 1)
                for r in range(pipeline if c < chunk else rank)
            )
            assert stage.layers == tuple(range(offset, offset + kinds.count(LayerType.decoder)))
            assert (stage.is_first, stage.is_last) == (LayerType.embedding in kinds, LayerType.loss in kinds)
            assert contents[chunk * pipeline + rank].mtp_depths == kinds.count(LayerType.mtp)


_PIECES = st.lists(
    st.sampled_from(["t", "tt", "t*2", "t*3,", "|", "(t|)*2", "(tt|t)*2", ",", "|*2", "(t*2|t)*3"]), max_size=8
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_PIECES, st.integers(0, 2))
def test_any_layout_is_read_as_megatron_reads_it(pieces: list[str], depths: int) -> None:
    text = "E" + "".join(pieces) + "|" + "m" * depths + "L"
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    layers = [stage.count(LayerType.decoder) for stage in theirs]
    stages = split_stages(sum(layers), len(theirs), text)
    assert [len(stage.layers) for stage in stages] == layers
