"""What of a model weights must have, and what may fill the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from steptron.checkpoint.fit import Filling, Fit, fit, logical_shapes
from steptron.config.schema import InitConfig, InitialWeightsMissingConfig, MtpConfig
from steptron.errors import ConfigError
from steptron.model.layer_spec import ModelSpec, model_spec
from tests.model.helpers import small_config

FILL = Filling(InitialWeightsMissingConfig(mtp="clone", value_head="initialise"), InitConfig(), 0)


def with_depths(depths: int, head: Literal["own", "shared"] = "own", **changes: Any) -> ModelSpec:
    return model_spec(small_config(mtp=MtpConfig(depths=depths, head=head), **changes))


def problems(stored: ModelSpec, needed: ModelSpec, filling: Filling | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        fit(Path("here"), logical_shapes(stored), needed, filling)
    assert caught.value.title == "the weights in here do not fit this model"
    return caught.value.problems


def test_equal_models_fit() -> None:
    spec = with_depths(2, value_head=True)
    for filling in (None, FILL):
        found = fit(Path("here"), logical_shapes(spec), spec, filling)
        assert found == Fit((), (), ()) and found.notes() == []


def test_more_depths_are_dropped_and_fewer_cloned() -> None:
    one, three = with_depths(1), with_depths(3)
    dropped = fit(Path("here"), logical_shapes(three), one, None)
    assert dropped.notes() == ["dropped: MTP depths 2 and 3, which this model does not have"]
    cloned = fit(Path("here"), logical_shapes(one), three, FILL)
    assert cloned.notes() == ["cloned: MTP depths 2 and 3 of this model from MTP depth 1 of the weights"]
    names = [name for name in logical_shapes(three) if cloned.leaves_open(name)]
    assert names == [name for name in logical_shapes(three) if name.startswith(("mtp.1.", "mtp.2."))]


def test_a_value_head_is_drawn() -> None:
    found = fit(Path("here"), logical_shapes(with_depths(1)), with_depths(2, value_head=True), FILL)
    assert found.notes() == [
        "cloned: MTP depth 2 of this model from MTP depth 1 of the weights",
        "drawn at random: value_head.weight",
    ]


def test_by_default_nothing_is_made_up() -> None:
    refusing = Filling(InitialWeightsMissingConfig(), InitConfig(), 0)
    for filling in (None, refusing):
        assert problems(with_depths(1), with_depths(3, value_head=True), filling) == (
            "MTP depths 2 and 3 (mtp.1, mtp.2) are not there: set train.initial_weights_missing.mtp to clone to start "
            "from copies of depth 1, or model.mtp.depths to 1",
            "value_head.weight [1, 32] is not there: set train.initial_weights_missing.value_head to initialise to "
            "draw it at random, or model.value_head to false",
        )


def test_without_any_depth_there_is_nothing_to_clone() -> None:
    for filling in (None, FILL):
        assert problems(with_depths(0), with_depths(1), filling) == (
            "MTP depth 1 (mtp.0) is not there, nor any other that could be cloned: set model.mtp.depths to 0",
        )


def test_what_a_depth_itself_lacks_is_not_made_up() -> None:
    """Weights whose depths share the main output matrix: cloning gives no depth one of its own."""
    assert problems(with_depths(1, head="shared"), with_depths(2), FILL) == ("mtp.0.head.weight [48, 32] is not there",)
    spare = fit(Path("here"), logical_shapes(with_depths(1)), with_depths(1, head="shared"), None)
    assert spare == Fit((), (), ())


def test_a_value_head_that_the_model_lacks_is_no_spare_part() -> None:
    assert problems(with_depths(1, value_head=True), with_depths(1), FILL) == (
        "value_head.weight [1, 32] is not part of this model",
    )
