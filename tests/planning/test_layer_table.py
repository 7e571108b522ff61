"""The layer table: grouping of equal layers and what the cells say."""

from __future__ import annotations

from typing import Any

import pytest

from steptron.model.layer_spec import model_spec
from steptron.planning.layer_table import describe_layer, index_ranges, layer_rows, legend
from steptron.planning.parameters import count_parameters
from tests.planning.models import flash, small


def test_equal_layers_of_the_released_model_share_a_row() -> None:
    spec = model_spec(flash())
    rows = layer_rows(spec.layers)
    assert [row.indices for row in rows] == [
        (0,),
        (1, 2),
        tuple(index for index in range(3, 43) if index % 4),
        tuple(range(4, 44, 4)),
        (43,),
        (44,),
    ]
    sizes = count_parameters(spec).layers
    assert all(sizes[index] == row.parameters for row in rows for index in row.indices)


@pytest.mark.parametrize(
    ("indices", "text"),
    [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 2, 4), "0, 2, 4"), ((3, 5, 6, 7, 9, 10), "3, 5-7, 9-10")],
)
def test_index_ranges(indices: tuple[int, ...], text: str) -> None:
    assert index_ranges(indices) == text


SCALING = dict(factor=2.0, original_length=131072)


def scaled_flash(**changes: Any) -> Any:
    rope = dict(theta=5e6, rotary_fraction=0.5, scaling=SCALING)
    return model_spec(flash(full=dict(num_heads=64, num_kv_groups=8, rope=rope), **changes))


def test_cells_of_the_released_model() -> None:
    layers = scaled_flash().layers
    assert describe_layer(layers[0]) == ("full", "64/8 x 128", "-", "5e6, 64/128, scaled", "gate", "dense 11,264", "-")
    assert describe_layer(layers[44]) == (
        "full", "64/8 x 128", "-", "5e6, 64/128, scaled", "gate", "MoE 288 top 8, 1,280 + 1,280", "routed 7, shared 16",
    )  # fmt: skip
    assert describe_layer(layers[43]) == (
        "sliding", "96/8 x 128", "512", "1e4, 128/128", "gate", "MoE 288 top 8, 1,280 + 1,280", "routed 7",
    )  # fmt: skip


def test_cells_of_options() -> None:
    def cells(layout: str, **changes: Any) -> tuple[str, ...]:
        return describe_layer(model_spec(small(layout, **changes)).layers[1])

    equal_groups = dict(num_heads=6, num_kv_groups=2, window=6, rope=dict(theta=12345.0))
    assert cells("S1F1", sliding=equal_groups)[1:4] == ("4/2 x 16", "6", "12345, 16/16")
    assert cells("S1F1+heads", sliding=equal_groups)[1] == "6/2 x 16"
    assert cells("S1F1+heads")[4] == "-"
    assert cells("S1F1+heads+gate+sink")[4] == "gate+sink"
    assert cells("S1F1+heads+sink")[4] == "sink"
    assert cells("S1F1+heads", clamp=dict(shared={1: 1.5}))[6] == "1.5"


def test_the_legend_explains_what_occurs_and_nothing_else() -> None:
    text = "\n".join(legend(scaled_flash().layers))
    assert "factor 2, low 1, high 32, original length 131,072" in text
    assert "weights x 3" in text
    assert "after SiLU" in text
    before = "\n".join(legend(model_spec(small(clamp=dict(routed={3: 1.0}, position="before_silu"))).layers))
    assert "before SiLU" in before
    assert "scaled" not in before
    dense = "\n".join(legend(model_spec(small(num_dense_layers=4)).layers))
    assert "MoE" not in dense
    assert "SiLU" not in dense
