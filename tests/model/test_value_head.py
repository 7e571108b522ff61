"""The value head: what it computes, where it lies, and that pre-training leaves it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steptron.checkpoint.released.model_config import write_model_config
from steptron.checkpoint.released.names import released_tensors
from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.schema import InitConfig, OptimizerConfig
from steptron.errors import ConfigError, UserError
from steptron.model.assembly import StepModel
from steptron.model.init import initialise, standard_deviation
from steptron.model.layer_spec import ParameterRole, model_spec
from steptron.model.parameter_shards import Cut, Place, cut_of
from steptron.model.stages import split_stages
from steptron.optim.rules import Algorithm, rule_of
from steptron.planning.parameters import count_parameters
from steptron.train.step import TrainStep
from tests.model.helpers import build_model, fill, relative_error, single_process, small_config
from tests.parallel.layouts import NANO, make_batches

CRITIC = small_config(value_head=True)
WEIGHT = "value_head.weight"


def critic(dtype: torch.dtype = torch.float32) -> StepModel:
    model = build_model(CRITIC, dtype=dtype)
    fill(model, 0)
    return model


def hidden_states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def reference(model: StepModel, hidden_SBH: torch.Tensor) -> torch.Tensor:
    """In float64, from the normed states in the model's dtype: the head itself rounds nothing."""
    normed = model.final_norm(hidden_SBH).double()
    return (normed * model.value_head.weight[0].double()).sum(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_products_in_float32(dtype: torch.dtype) -> None:
    """A product in bf16 would be off by 1e-3."""
    model, hidden = critic(dtype), hidden_states(dtype)
    values = model.values(hidden)
    assert values.dtype is torch.float32 and values.shape == (7, 3)
    assert relative_error(values, reference(model, hidden)) < 1e-6


def test_gradients_of_the_head_the_norm_and_the_trunk() -> None:
    model, hidden = critic(), hidden_states().requires_grad_()
    returns = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    (0.5 * (model.values(hidden) - returns).square().sum()).backward()
    errors_SB = reference(model, hidden).detach() - returns
    normed = model.final_norm(hidden).detach().double()
    assert relative_error(model.value_head.weight.grad[0], torch.einsum("sb,sbh->h", errors_SB, normed)) < 1e-6
    exact = hidden.detach().double().requires_grad_()
    scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + model.final_norm.eps)
    normed = scaled * (1 + model.final_norm.weight.detach().double())
    (0.5 * (normed @ model.value_head.weight[0].detach().double() - returns).square().sum()).backward()
    assert hidden.grad is not None and exact.grad is not None
    assert relative_error(hidden.grad, exact.grad) < 1e-5
    others = {n for n, p in model.named_parameters() if p.grad is not None}
    assert others == {WEIGHT, "final_norm.weight"}


def test_only_the_last_stage_of_a_model_with_a_head_has_values() -> None:
    stages = [build_model(CRITIC, stage) for stage in split_stages(5, 3)]
    assert [WEIGHT in dict(stage.logical_tensors()) for stage in stages] == [False, False, True]
    for model in (stages[0], build_model(small_config())):
        with pytest.raises(ValueError, match=r"a value head \(model.value_head\), on its last pipeline stage"):
            model.values(hidden_states())


def test_what_the_spec_says_of_it() -> None:
    spec = model_spec(CRITIC)
    head = spec.parameters()[-1]
    assert (head.name, head.shape, head.role) == (WEIGHT, (1, 32), ParameterRole.VALUE_HEAD)
    assert cut_of(head.role) is Cut.NONE
    assert rule_of(OptimizerConfig(lr=1.0), head.role).algorithm is Algorithm.ADAMW
    assert WEIGHT not in [p.name for p in spec.trained_parameters(2, freeze_router=False)]
    with_head, without = count_parameters(spec), count_parameters(model_spec(small_config()))
    assert with_head.value_head == 32 and with_head.total == without.total + 32 and with_head.main == without.main


def test_it_starts_near_zero() -> None:
    """StepFun's open trainer: standard deviation 1e-5, so that an untrained critic's values are about 0."""
    assert standard_deviation(ParameterRole.VALUE_HEAD, InitConfig(), 5) == 1e-5
    spec = model_spec(small_config(hidden_size=4096, value_head=True))
    tensors = {WEIGHT: torch.empty(1, 4096)}
    initialise(tensors, spec, InitConfig(), 0, Place())
    assert 0.9e-5 < tensors[WEIGHT].std() < 1.1e-5


def test_pretraining_neither_owns_nor_changes_it() -> None:
    """Decay alone would change it, if the optimizer had it."""
    config = load(NANO, ["model.value_head=true", "train.output=unused", "data.sequence_length=48"]).config
    train = TrainStep(config, single_process(), torch.device("cpu"))
    tensors = dict(train.chunks.logical_tensors())
    before = tensors[WEIGHT].detach().clone()
    assert before.count_nonzero() == before.numel() and not tensors[WEIGHT].requires_grad
    train.run(make_batches(count=1), 1e-2, 1e-3)
    assert torch.equal(tensors[WEIGHT], before)
    assert WEIGHT not in {piece.piece.shard.parameter.name for piece in train.sharded.owned}


def test_a_run_cannot_set_its_optimizer(tmp_path: Path) -> None:
    overrides = ["model.value_head=true", f"train.output={tmp_path}", "optimizer.roles={value_head: {decay: false}}"]
    with pytest.raises(ConfigError, match=r"optimizer\.roles\.value_head is set, but the run trains no such parameter"):
        check(load(NANO, overrides).config, 1)


def test_the_released_layout_has_no_place_for_it() -> None:
    with pytest.raises(UserError, match=r"value_head\.weight has no place in the released layout"):
        released_tensors(model_spec(CRITIC))
    with pytest.raises(ConfigError, match=r"model\.value_head is true: the release has no tensor for a value head"):
        write_model_config(CRITIC, "bf16")
