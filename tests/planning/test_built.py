"""Agreement of a built model's shapes with its specs."""

from __future__ import annotations

import pytest

from steptron.model.layer_spec import model_spec
from steptron.planning.built import check_shapes
from tests.planning.models import small


def shapes() -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in model_spec(small()).parameters()}


def test_equal_shapes_pass() -> None:
    check_shapes(model_spec(small()), shapes())


def test_every_difference_is_named() -> None:
    built = shapes()
    del built["layers.2.ffn.router.bias"]
    built["head.bias"] = (1000,)
    built["layers.1.attention.output_projection.weight"] = (64, 64)
    with pytest.raises(ValueError) as caught:
        check_shapes(model_spec(small()), built)
    assert str(caught.value) == (
        "the built model differs from its specs: layers.2.ffn.router.bias (8,) is not built; "
        "head.bias (1000,) is not in the specs; "
        "layers.1.attention.output_projection.weight is built as (64, 64), the specs say (64, 96)"
    )
