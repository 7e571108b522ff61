"""Initial values: a pure function of (seed, logical name), with the documented spread."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.config.schema import InitConfig, MoeConfig, MtpConfig
from steptron.model.init import initialise, standard_deviation
from steptron.model.layer_spec import RESIDUAL_WRITERS, ParameterRole, model_spec
from steptron.model.parameter_shards import Cut, Place, cut_of, shard
from steptron.model.stages import split_stages
from tests.model.helpers import build_model, small_config

CONFIG = small_config(layout="S3F1+heads+gate+sink")
EXPERTS = CONFIG.moe.num_experts
WHOLE = Place()


def empty_tensors(place: Place = WHOLE, dtype: torch.dtype = torch.float32):
    """Tensors by logical name, full of NaN."""
    return {
        parameter.name: torch.full(shard(parameter, place).shape, math.nan, dtype=dtype)
        for parameter in model_spec(CONFIG).parameters()
    }


def initialised(
    seed: int = 0, config: InitConfig | None = None, place: Place = WHOLE, **kwargs
) -> dict[str, torch.Tensor]:
    tensors = empty_tensors(place, **kwargs)
    initialise(tensors, model_spec(CONFIG), config or InitConfig(), seed, place)
    return tensors


def test_every_element_is_set() -> None:
    assert [name for name, tensor in initialised().items() if not tensor.isfinite().all()] == []


def test_norms_sinks_and_biases_are_zero_and_nothing_else() -> None:
    roles = {p.name: p.role for p in model_spec(CONFIG).parameters()}
    zero = {name for name, tensor in initialised().items() if torch.count_nonzero(tensor) == 0}
    expected = {ParameterRole.NORM, ParameterRole.SINK, ParameterRole.ROUTER_BIAS}
    assert zero == {name for name, role in roles.items() if role in expected}


def test_values_repeat_and_depend_on_the_seed() -> None:
    first, again, other = initialised(0), initialised(0), initialised(1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if tensor.any():
            assert not torch.equal(tensor, other[name]), name


def test_no_two_logical_matrices_start_alike() -> None:
    """A generator that is reused, or a seed that forgets a part of the name, repeats values."""
    seen: dict[tuple[float, ...], str] = {}
    tensors = initialised(config=InitConfig(scale_residual_by_depth=False))
    for parameter in model_spec(CONFIG).parameters():
        for matrix in parameter.matrices:
            stack = tensors[parameter.name] if parameter.is_expert else tensors[parameter.name].unsqueeze(0)
            for number, values in enumerate(stack):
                start = tuple(values[matrix.rows[0] : matrix.rows[1]].flatten()[:4].tolist())
                if any(start):
                    assert start not in seen, f"{matrix.name}[{number}] starts like {seen[start]}"
                    seen[start] = f"{matrix.name}[{number}]"
    assert len(seen) > 100


def test_expert_parallel_ranks_hold_slices_of_the_same_values() -> None:
    whole = initialised()
    for rank, first in enumerate(range(0, EXPERTS, 2)):
        part = initialised(place=Place(expert_rank=rank, expert_size=EXPERTS // 2))
        for parameter in model_spec(CONFIG).parameters():
            expected = whole[parameter.name]
            if parameter.is_expert:
                expected = expected[first : first + 2]
            assert torch.equal(part[parameter.name], expected), parameter.name


def test_tensor_parallel_ranks_hold_rows_or_columns_of_the_same_values() -> None:
    """Of fused tensors every matrix is cut on its own."""
    whole = initialised()
    parts = [initialised(place=Place(tensor_rank=rank, tensor_size=2)) for rank in range(2)]
    for parameter in model_spec(CONFIG).parameters():
        cut = cut_of(parameter.role)
        if cut is Cut.NONE or cut is Cut.EXPERTS:
            assert all(torch.equal(part[parameter.name], whole[parameter.name]) for part in parts), parameter.name
        elif cut is Cut.COLUMNS:
            assert torch.equal(torch.cat([part[parameter.name] for part in parts], dim=1), whole[parameter.name])
        else:
            local = 0
            for matrix in parameter.matrices:
                start, stop = matrix.rows
                half = (stop - start) // 2
                joined = torch.cat([part[parameter.name][local : local + half] for part in parts])
                assert torch.equal(joined, whole[parameter.name][start:stop]), matrix.name
                local += half
            assert all(len(part[parameter.name]) == local for part in parts)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_every_stage_split_gives_the_same_values(num_stages: int) -> None:
    expected = initialised(seed=3)
    found: set[str] = set()
    for stage in split_stages(CONFIG.num_layers, num_stages):
        model = build_model(CONFIG, stage)
        for tensor in dict(model.logical_tensors()).values():
            tensor.data.fill_(math.nan)
        tensors = dict(model.logical_tensors())
        initialise(tensors, model.spec, CONFIG.init, 3, WHOLE)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name
        found |= tensors.keys()
    assert found == expected.keys()


def test_values_do_not_depend_on_global_random_state_and_leave_it_alone() -> None:
    torch.manual_seed(1)
    first = initialised()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = initialised()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    initialised()
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_values_are_the_rounded_fp32_ones() -> None:
    wide, narrow = initialised(), initialised(dtype=torch.bfloat16)
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)


def test_standard_deviations_by_role() -> None:
    config = InitConfig(std=0.05, embedding_std=0.3, head_std=0.2, router_std=0.1, value_head_std=0.01)
    depth = math.sqrt(2 * 7)
    for role in ParameterRole:
        expected = {
            ParameterRole.EMBEDDING: 0.3,
            ParameterRole.HEAD: 0.2,
            ParameterRole.ROUTER: 0.1,
            ParameterRole.NORM: 0.0,
            ParameterRole.SINK: 0.0,
            ParameterRole.ROUTER_BIAS: 0.0,
            ParameterRole.VALUE_HEAD: 0.01,
        }.get(role, 0.05)
        if role.value in {"attention_output", "ffn_down", "expert_down", "shared_down"}:
            assert role in RESIDUAL_WRITERS
            expected /= depth
        assert standard_deviation(role, config, 7) == pytest.approx(expected)
    unset = InitConfig(std=0.05, scale_residual_by_depth=False)
    assert {standard_deviation(role, unset, 7) for role in ParameterRole} == {0.0, 0.05, 1e-5}


def test_spread_and_mean_of_what_is_drawn() -> None:
    """Sample mean and standard deviation within five of their own standard errors, per matrix."""
    config = InitConfig(std=0.05, embedding_std=0.3, head_std=0.2, router_std=0.1)
    tensors = initialised(config=config)
    for parameter in model_spec(CONFIG).parameters():
        for matrix in parameter.matrices:
            std = standard_deviation(matrix.role, config, CONFIG.num_layers)
            if std == 0.0:
                continue
            tensor = tensors[parameter.name].double()
            values = tensor[..., slice(*matrix.rows), :] if parameter.is_expert else tensor[slice(*matrix.rows)]
            error = std / math.sqrt(values.numel())
            assert abs(values.mean().item()) < 5 * error, matrix.name
            assert abs(values.std().item() - std) < 5 * error / math.sqrt(2), matrix.name


def test_values_of_a_name_survive_changes_elsewhere() -> None:
    """More experts or MTP depths leave what stays as it was."""
    before = initialised()
    larger = small_config(
        layout="S3F1+heads+gate+sink",
        mtp=MtpConfig(depths=3),
        moe=MoeConfig(num_experts=8, top_k=2, expert_hidden_size=16, shared_hidden_size=24),
    )
    tensors = {p.name: torch.full(p.shape, math.nan) for p in model_spec(larger).parameters()}
    initialise(tensors, model_spec(larger), InitConfig(), 0, WHOLE)
    for name, values in before.items():
        if "router" not in name:
            assert torch.equal(tensors[name][: values.shape[0]], values), name
