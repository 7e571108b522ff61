"""Which part of each parameter a rank holds."""

from __future__ import annotations

import math

import pytest

from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec, model_spec
from steptron.model.parameter_shards import Cut, Place, cut_of, shard
from tests.model.helpers import small_config

SPEC = model_spec(small_config(layout="S3F1+heads+gate+sink"))
PARAMETERS = {parameter.name: parameter for parameter in SPEC.parameters()}


def test_every_role_has_its_cut() -> None:
    by_cut: dict[Cut, set[ParameterRole]] = {}
    for role in ParameterRole:
        by_cut.setdefault(cut_of(role), set()).add(role)
    assert by_cut[Cut.COLUMNS] == {
        ParameterRole.ATTENTION_OUTPUT,
        ParameterRole.FFN_DOWN,
        ParameterRole.SHARED_DOWN,
    }
    assert by_cut[Cut.EXPERTS] == {ParameterRole.EXPERT_GATE, ParameterRole.EXPERT_UP, ParameterRole.EXPERT_DOWN}
    assert by_cut[Cut.NONE] == {
        ParameterRole.NORM,
        ParameterRole.ROUTER,
        ParameterRole.ROUTER_BIAS,
        ParameterRole.MTP_PROJECTION,
        ParameterRole.VALUE_HEAD,
    }


def test_the_matrices_of_a_parameter_are_cut_alike() -> None:
    for parameter in PARAMETERS.values():
        assert len({cut_of(matrix.role) for matrix in parameter.matrices}) == 1, parameter.name


def test_a_rank_holds_the_heads_that_belong_together() -> None:
    """Layer 1 slides: 4 query heads and 2 groups of 8 dimensions, and a gate row per head."""
    parameter = PARAMETERS["layers.1.attention.input_projection.weight"]
    assert parameter.shape == (4 * 8 + 2 * 8 + 2 * 8 + 4, 32)
    part = shard(parameter, Place(tensor_rank=1, tensor_size=2))
    assert part.shape == (34, 32)
    assert [(m.matrix.role.value, m.rows, m.axis, m.index, m.count) for m in part.matrices] == [
        ("query", (0, 16), 0, 1, 2),
        ("key", (16, 24), 0, 1, 2),
        ("value", (24, 32), 0, 1, 2),
        ("head_gate", (32, 34), 0, 1, 2),
    ]


def test_a_vocabulary_that_does_not_divide_is_filled_up() -> None:
    """48 rows over 5 ranks: 10 on each, the last of which has 8 and two that are padding."""
    parts = [shard(PARAMETERS["head.weight"], Place(tensor_rank=rank, tensor_size=5)) for rank in range(5)]
    assert [part.shape for part in parts] == [(10, 32)] * 5
    assert [part.matrices[0].range for part in parts] == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 48)]
    assert [part.matrices[0].rows for part in parts] == [(0, 10)] * 4 + [(0, 8)]
    assert not any(part.matrices[0].is_even for part in parts)


def test_columns_and_experts() -> None:
    place = Place(tensor_rank=1, tensor_size=2, expert_rank=3, expert_size=4)
    output = shard(PARAMETERS["layers.1.attention.output_projection.weight"], place)
    assert output.shape == (32, 16)
    assert [(m.rows, m.axis, m.index, m.count) for m in output.matrices] == [((0, 32), 1, 1, 2)]
    experts = shard(PARAMETERS["layers.1.ffn.experts.gate_up_projection"], place)
    assert experts.shape == (1, 32, 32)
    assert [(m.rows, m.axis, m.index, m.count) for m in experts.matrices] == [((0, 16), 0, 3, 4), ((16, 32), 0, 3, 4)]


@pytest.mark.parametrize("tensor, expert", [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_parts_add_up_to_the_model(tensor: int, expert: int) -> None:
    for parameter in PARAMETERS.values():
        cut = cut_of(parameter.role)
        parts = [shard(parameter, Place(t, tensor, e, expert)).size for t in range(tensor) for e in range(expert)]
        copies = {Cut.NONE: tensor * expert, Cut.EXPERTS: tensor}.get(cut, expert)
        assert sum(parts) == parameter.size * copies
        assert all(part.size == math.prod(part.shape) for part in [shard(parameter, Place(0, tensor, 0, expert))])


def test_uneven_parts_are_refused_by_name() -> None:
    odd = ParameterSpec("sink", (47,), (LogicalMatrix("sink", ParameterRole.SINK, (0, 47)),))
    with pytest.raises(ValueError, match=r"sink: 47 rows cannot be shared by 2 ranks"):
        shard(odd, Place(tensor_size=2))
