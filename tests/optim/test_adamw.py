"""AdamW and SGD against their formulas in float64, on fp32 and on bf16 parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from steptron.config.schema import OptimizerConfig, RoleOptimizerConfig
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec
from steptron.optim.adamw import AdamW
from steptron.optim.base import Optimizer
from steptron.optim.build import build_optimizer
from steptron.optim.combined import Combined
from steptron.optim.owned import OwnedPiece
from steptron.optim.sgd import Sgd
from steptron_kernels.polar_express.plain import polar_express
from tests.optim.pieces import own, state_of

SPECS = [
    ("embedding.weight", (6, 4), ParameterRole.EMBEDDING),
    ("layers.0.attention_norm.weight", (4,), ParameterRole.NORM),
    ("layers.0.attention.sink", (3,), ParameterRole.SINK),
    ("layers.0.ffn.experts.down_projection", (2, 4, 3), ParameterRole.EXPERT_DOWN),
    ("head.weight", (6, 4), ParameterRole.HEAD),
]
DECAYED_ALWAYS = {"embedding.weight", "layers.0.ffn.experts.down_projection", "head.weight"}


@dataclass(frozen=True)
class Named:
    """A parameter and its spec."""

    spec: ParameterSpec
    tensor: torch.nn.Parameter


def make_parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Named]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Named(
            ParameterSpec(name, shape, (LogicalMatrix(name, role, (0, shape[1 if "experts" in name else 0])),)),
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)),
        )
        for name, shape, role in SPECS
    ]


def owned(parameters: list[Named], config: OptimizerConfig) -> list[OwnedPiece]:
    return own([p.spec for p in parameters], {p.spec.name: p.tensor for p in parameters}, config)


def adamw(config: OptimizerConfig, parameters: list[Named]) -> AdamW:
    return AdamW(config, owned(parameters, config))


def build(config: OptimizerConfig, parameters: list[Named]) -> Optimizer:
    return build_optimizer(config, owned(parameters, config), polar_express)


def set_gradients(parameters: list[Named], step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters:
        p.tensor.main_grad.copy_(scale * torch.randn(p.spec.shape, generator=generator))  # type: ignore[attr-defined]
    return {p.spec.name: p.tensor.main_grad.double() for p in parameters}  # type: ignore[attr-defined]


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(
        **({"name": "adamw", "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1} | changes)
    )


class Reference:
    """AdamW (arXiv 1711.05101, algorithm 2) element by element in float64."""

    def __init__(self, config: OptimizerConfig, parameters: list[Named]) -> None:
        self.config = config
        self.w = {p.spec.name: p.tensor.detach().double() for p in parameters}
        self.m = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.t = 0

    def step(self, gradients: dict[str, torch.Tensor], lr: float) -> None:
        c, self.t = self.config, self.t + 1
        for name, g in gradients.items():
            decay = c.weight_decay if c.decay_norms or name in DECAYED_ALWAYS else 0.0
            self.m[name] = c.beta1 * self.m[name] + (1 - c.beta1) * g
            self.v[name] = c.beta2 * self.v[name] + (1 - c.beta2) * g * g
            m_hat = self.m[name] / (1 - c.beta1**self.t)
            v_hat = self.v[name] / (1 - c.beta2**self.t)
            self.w[name] = self.w[name] - lr * (m_hat / (v_hat.sqrt() + c.eps) + decay * self.w[name])


@pytest.mark.parametrize("decay_norms", [True, False])
@pytest.mark.parametrize("changes", [{}, {"beta1": 0.0}, {"eps": 0.1}, {"weight_decay": 0.0}], ids=str)
def test_adamw_is_its_formula(decay_norms: bool, changes: dict[str, float]) -> None:
    """Over ten steps with a learning rate that changes."""
    options = config(decay_norms=decay_norms, **changes)
    parameters = make_parameters()
    optimizer, reference = adamw(options, parameters), Reference(options, parameters)
    for step in range(10):
        lr = 1e-2 * (step + 1) / 10
        gradients = set_gradients(parameters, step)
        optimizer.step(lr)
        reference.step(gradients, lr)
    state = state_of(optimizer)
    for p in parameters:
        name = p.spec.name
        torch.testing.assert_close(p.tensor.detach().double(), reference.w[name], rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(state["exp_avg"][name].double(), reference.m[name].flatten(), rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(
            state["exp_avg_sq"][name].double(), reference.v[name].flatten(), rtol=2e-6, atol=1e-7
        )
    assert optimizer.num_steps == 10


@pytest.mark.parametrize("decay_norms", [True, False])
def test_which_parameters_decay(decay_norms: bool) -> None:
    """With zero gradients only weight decay moves weights."""
    parameters = make_parameters()
    before = {p.spec.name: p.tensor.detach().clone() for p in parameters}
    adamw(config(decay_norms=decay_norms), parameters).step(0.5)
    for p in parameters:
        decayed = decay_norms or p.spec.name in DECAYED_ALWAYS
        expected = before[p.spec.name] * (1 - 0.5 * 0.1 if decayed else 1.0)
        torch.testing.assert_close(p.tensor.detach(), expected)


def test_a_learning_rate_of_zero_moves_nothing_but_the_moments() -> None:
    """The first step of a warm-up."""
    parameters = make_parameters()
    before = [p.tensor.detach().clone() for p in parameters]
    optimizer = adamw(config(), parameters)
    set_gradients(parameters, 0)
    optimizer.step(0.0)
    assert all(torch.equal(p.tensor, b) for p, b in zip(parameters, before, strict=True))
    assert all(tensor.any() for tensor in state_of(optimizer)["exp_avg"].values())


def test_gradients_are_left_as_they_are() -> None:
    parameters = make_parameters()
    optimizer = adamw(config(), parameters)
    gradients = {name: g.clone() for name, g in set_gradients(parameters, 0).items()}
    optimizer.step(1e-2)
    for p in parameters:
        assert torch.equal(p.tensor.main_grad.double(), gradients[p.spec.name])  # type: ignore[attr-defined]


ROLES = {
    "embedding": RoleOptimizerConfig(lr_multiplier=3.0),
    "expert_down": RoleOptimizerConfig(lr_multiplier=0.25, decay=False),
    "sink": RoleOptimizerConfig(lr_multiplier=0.0),
    "norm": RoleOptimizerConfig(decay=False),
}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_roles_have_learning_rates_and_decay_of_their_own(kind: str) -> None:
    """A multiplier scales the whole update, decay included."""
    parameters, plain = make_parameters(), make_parameters()
    before = {p.spec.name: p.tensor.detach().clone() for p in parameters}
    optimizers = build(config(name=kind, roles=ROLES), parameters), build(config(name=kind), plain)
    for pair, optimizer in zip((parameters, plain), optimizers, strict=True):
        set_gradients(pair, 0)
        optimizer.step(1e-3)
    for p, other in zip(parameters, plain, strict=True):
        role = ROLES.get(p.spec.role.value, RoleOptimizerConfig())
        start = before[p.spec.name].double()
        expected = other.tensor.detach().double() - start
        if role.decay is False:
            expected += 1e-3 * 0.1 * start
        moved = p.tensor.detach().double() - start
        torch.testing.assert_close(moved, expected * role.lr_multiplier, rtol=1e-3, atol=3e-7)


# ----------------------------------------------------------------------------------------- bf16


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_below_bf16_resolution_add_up(kind: str) -> None:
    """Each moves a weight of 1 by about 1e-4, far below bf16's 2^-8: 200 of them move it by 2e-2."""
    parameters = make_parameters(torch.bfloat16)
    for p in parameters:
        p.tensor.data.fill_(1.0)
    optimizer = build(config(name=kind, weight_decay=0.0), parameters)
    for p in parameters:
        p.tensor.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.step(1e-4)
    assert all((p.tensor == 1.0).all() for p in parameters)
    for _ in range(199):
        optimizer.step(1e-4)
    master = state_of(optimizer)["master"]
    for p in parameters:
        assert p.tensor.dtype is torch.bfloat16 and master[p.spec.name].dtype is torch.float32
        assert master[p.spec.name].flatten()[0].item() == pytest.approx(0.98, abs=1e-5)
        assert torch.equal(p.tensor.detach().flatten(), master[p.spec.name].bfloat16())


def test_bf16_parameters_follow_fp32_weights_exactly() -> None:
    """The master weights of a bf16 model take the path of an fp32 model that starts at the same values."""
    narrow, wide = make_parameters(torch.bfloat16), make_parameters()
    for n, w in zip(narrow, wide, strict=True):
        w.tensor.data.copy_(n.tensor.data)
    optimizers = adamw(config(), narrow), adamw(config(), wide)
    for step in range(5):
        for parameters, optimizer in zip((narrow, wide), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step(1e-2)
    for n, w in zip(narrow, wide, strict=True):
        assert torch.equal(state_of(optimizers[0])["master"][n.spec.name], w.tensor.detach().flatten())
        assert torch.equal(n.tensor.detach(), w.tensor.detach().bfloat16())


# ---------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, moments", [("adamw", {"exp_avg", "exp_avg_sq"}), ("sgd", set())])
def test_state_exists_from_the_start_as_long_as_the_pieces(kind: str, moments: set[str], dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    state = state_of(build(config(name=kind), parameters))
    assert state.keys() == moments | {"master"}
    for what, tensors in state.items():
        expected = (
            {} if what == "master" and dtype is torch.float32 else {p.spec.name: (p.spec.size,) for p in parameters}
        )
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
        assert all(tensor.dtype is torch.float32 for tensor in tensors.values())


def run(optimizer: Optimizer, parameters: list[Named], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step(1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    straight = make_parameters(dtype)
    uninterrupted = build(config(name=kind), straight)
    run(uninterrupted, straight, range(7))

    first = make_parameters(dtype)
    saved = build(config(name=kind), first)
    run(saved, first, range(4))
    second = make_parameters(dtype, seed=99)
    resumed = build(config(name=kind), second)
    for old, new in zip(first, second, strict=True):
        new.tensor.data.copy_(old.tensor.data)
    for what, tensors in state_of(saved).items():
        for name, tensor in tensors.items():
            state_of(resumed)[what][name].copy_(tensor)  # into the optimizer's own tensors
    resumed.set_num_steps(saved.num_steps)
    assert resumed.num_steps == 4
    run(resumed, second, range(4, 7))

    assert resumed.num_steps == uninterrupted.num_steps == 7
    for a, b in zip(straight, second, strict=True):
        assert torch.equal(a.tensor, b.tensor)
    for what, tensors in state_of(uninterrupted).items():
        assert all(torch.equal(tensor, state_of(resumed)[what][name]) for name, tensor in tensors.items())


def test_forgetting_the_number_of_steps_would_show() -> None:
    """Bias correction depends on it."""
    moved = []
    for steps in (0, 4):
        parameters = make_parameters()
        optimizer = adamw(config(), parameters)
        optimizer.set_num_steps(steps)
        run(optimizer, parameters, range(1))
        moved.append(parameters[0].tensor.detach())
    assert (moved[0] - moved[1]).abs().max() > 1e-4


# ------------------------------------------------------------------------------------------ sgd


def test_sgd_is_its_formula() -> None:
    parameters = make_parameters()
    expected = {p.spec.name: p.tensor.detach().double() for p in parameters}
    optimizer = Sgd(owned(parameters, config(name="sgd", weight_decay=0.5)))
    for step in range(5):
        for name, g in set_gradients(parameters, step).items():
            expected[name] = expected[name] - 0.03 * (step + 1) * (g + 0.5 * expected[name])
        optimizer.step(0.03 * (step + 1))
    for p in parameters:
        torch.testing.assert_close(p.tensor.detach().double(), expected[p.spec.name], rtol=1e-6, atol=1e-6)
    assert optimizer.num_steps == 5


def test_build_takes_the_named_optimizer() -> None:
    assert isinstance(build(config(name="adamw"), make_parameters()), AdamW)
    assert isinstance(build(config(name="sgd"), make_parameters()), Sgd)
    muon = build(config(name="muon"), make_parameters())
    assert isinstance(muon, Combined)
    assert {kind: len(tensors) for kind, tensors in muon.state().items()} == {
        "momentum": 2,  # two experts
        "exp_avg": 4,
        "exp_avg_sq": 4,
        "master": 0,
    }


def test_gradients_that_are_not_finite_are_not_hidden() -> None:
    """The loop must refuse them before: the optimizer passes them on."""
    parameters = make_parameters()
    optimizer = adamw(config(), parameters)
    parameters[0].tensor.main_grad[0, 0] = math.nan  # type: ignore[attr-defined]
    optimizer.step(1e-2)
    assert parameters[0].tensor[0, 0].isnan() and parameters[1].tensor.isfinite().all()


def test_a_rank_without_parameters_steps_along() -> None:
    """A pipeline stage may be empty."""
    optimizer = AdamW(OptimizerConfig(lr=0.1), [])
    optimizer.step(0.1)
    assert optimizer.state() == {"exp_avg": [], "exp_avg_sq": [], "master": []}
    optimizer.set_num_steps(3)
    assert optimizer.num_steps == 3
