"""Splitting layers into pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptron.model.stages import Stage, split_stages


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
