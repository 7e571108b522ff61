"""Muon against an independent float64 reference, matrix by matrix, and across layouts."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from steptron.config.schema import MuonConfig, OptimizerConfig
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec
from steptron.model.parameter_shards import Place, matrices_of, shard
from steptron.optim import buckets, muon
from steptron.optim.buffer_plan import Piece
from steptron.optim.muon import Muon
from steptron.optim.owned import OwnedPiece
from steptron.optim.rules import HIDDEN_MATRICES, rule_of
from steptron_kernels.polar_express import plain
from steptron_kernels.polar_express.choose import choose
from tests.optim import muon_runs, polar_reference
from tests.parallel import layouts
from tests.parallel.layouts import Outcome, assemble
from tests.worker_pool import WorkerPool

POLAR_EXPRESS = choose(torch.device("cpu"), native=True)


def orthogonalised(m: np.ndarray) -> np.ndarray:
    """Six steps of Polar Express on the singular values, in float64."""
    wide = m.astype(np.float64)
    u, s, v = np.linalg.svd(wide, full_matrices=False)
    return (u * polar_reference.scalars(s / polar_reference.divisor(wide), polar_reference.rows_of(6))) @ v


def reference(
    weight: np.ndarray,
    gradients: list[np.ndarray],
    lr: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    decay: float = 0.1,
    factor: float | None = None,
) -> np.ndarray:
    w, buffer = weight.astype(np.float64), np.zeros(weight.shape)
    factor = 0.2 * math.sqrt(max(w.shape)) if factor is None else factor
    for gradient in gradients:
        g = gradient.astype(np.float64)
        buffer = momentum * buffer + g
        direction = g + momentum * buffer if nesterov else buffer
        w = w * (1 - lr * decay) - lr * factor * orthogonalised(direction)
    return w


def make_muon(
    shapes: list[tuple[int, int]], optimizer: OptimizerConfig, **kwargs: Any
) -> tuple[Muon, list[OwnedPiece]]:
    generator = torch.Generator().manual_seed(0)
    owned = []
    for number, (rows, columns) in enumerate(shapes):
        name = f"matrix.{number}"
        spec = ParameterSpec(name, (rows, columns), (LogicalMatrix(name, ParameterRole.FFN_GATE, (0, rows)),))
        part = shard(spec, Place())
        (place,) = matrices_of(part)
        piece = Piece(part, 0, rows * columns, rule_of(optimizer, ParameterRole.FFN_GATE), 0, place)
        weight = torch.randn(rows * columns, generator=generator)
        owned.append(OwnedPiece(piece, weight, torch.zeros_like(weight)))
    return Muon(optimizer.muon, owned, POLAR_EXPRESS, **kwargs), owned


def run(optimizer: Muon, owned: list[OwnedPiece], gradients: list[list[np.ndarray]], lr: float) -> list[np.ndarray]:
    for step in gradients:
        for piece, gradient in zip(owned, step, strict=True):
            piece.gradient.copy_(torch.from_numpy(gradient).view(-1))
        optimizer.step(lr)
    return [piece.weight.float().view(piece.piece.matrix.shape).numpy() for piece in owned]  # type: ignore[union-attr]


def make_gradients(shapes: list[tuple[int, int]], steps: int) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(0)
    return [[generator.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(steps)]


def error(own: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(own - right) / np.linalg.norm(right))


SHAPES = [(24, 40), (40, 24), (24, 40), (16, 16), (1, 30), (30, 1)]
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "momentum 0.5": ({"muon": {"momentum": 0.5}}, {"momentum": 0.5}),
    "no Nesterov": ({"muon": {"nesterov": False}}, {"nesterov": False}),
    "no decay": ({"weight_decay": 0.0}, {"decay": 0.0}),
    "a role without decay": ({"roles": {"ffn_gate": {"decay": False}}}, {"decay": 0.0}),
    "half the rate": ({"roles": {"ffn_gate": {"lr_multiplier": 0.5}}}, {"half": True}),
}
SCALES = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}


def after_steps(settings: dict[str, Any], steps: int = 4, lr: float = 0.02) -> tuple[list[np.ndarray], ...]:
    settings = {**settings, "muon": {"precision": "fp32", **settings.get("muon", {})}}
    optimizer, owned = make_muon(SHAPES, OptimizerConfig(lr=lr, **settings))
    weights = [p.weight.view(p.piece.matrix.shape).numpy().copy() for p in owned]  # type: ignore[union-attr]
    gradients = make_gradients(SHAPES, steps)
    own = run(optimizer, owned, gradients, lr)
    return own, weights, [[step[i] for step in gradients] for i in range(len(SHAPES))]


@pytest.mark.parametrize("name", SETTINGS)
def test_updates_follow_the_definition(name: str) -> None:
    settings, expected = SETTINGS[name]
    own, weights, gradients = after_steps(settings)
    expected = dict(expected)
    lr = 0.01 if expected.pop("half", False) else 0.02
    for i in range(len(SHAPES)):
        assert error(own[i], reference(weights[i], gradients[i], lr, **expected)) < 2e-6
        # And every other setting is noticed.
        for other, (_, wrong) in SETTINGS.items():
            if other not in (name, "half the rate") and wrong != expected:
                differs = error(own[i], reference(weights[i], gradients[i], lr, **wrong))
                assert differs > 1e-4 or SHAPES[i] in [(1, 30), (30, 1)], other


@pytest.mark.parametrize("scale", SCALES)
def test_scale_rules(scale: str) -> None:
    own, weights, gradients = after_steps({"muon": {"scale": scale}})
    for i, shape in enumerate(SHAPES):
        assert error(own[i], reference(weights[i], gradients[i], 0.02, factor=SCALES[scale](*shape))) < 2e-6


def test_small_batches_and_fixed_ones_give_the_same() -> None:
    results = []
    for elements, deterministic in ((1 << 26, False), (1, False), (1 << 26, True)):
        config = OptimizerConfig(lr=0.02, muon=MuonConfig(precision="fp32", batch_elements=elements))
        optimizer, owned = make_muon(SHAPES, config, deterministic=deterministic)
        results.append(run(optimizer, owned, make_gradients(SHAPES, 2), 0.02))
    for other in results[1:]:
        for own, right in zip(other, results[0], strict=True):
            assert error(own, right) < 1e-6


def test_deterministic_batches_never_hold_one_matrix_and_have_one_size() -> None:
    seen: list[int] = []

    def watched(m_NRC: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(m_NRC))
        return plain.polar_express(m_NRC, *args)

    for elements in (1 << 26, 200, 1):
        config = OptimizerConfig(lr=0.02, muon=MuonConfig(batch_elements=elements))
        seen.clear()
        for shapes in ([(8, 12)], [(8, 12)] * 3, [(8, 12)] * 20):
            _, owned = make_muon(shapes, config)
            Muon(config.muon, owned, watched, deterministic=True).step(0.1)
        assert len(set(seen)) == 1 and seen[0] > 1


def test_a_matrix_that_is_not_finite_is_named_and_nothing_else_changes() -> None:
    shapes = [(8, 12), (8, 12), (12, 8)]
    config = OptimizerConfig(lr=0.02)
    results = {}
    for bad in (None, math.nan, math.inf):
        optimizer, owned = make_muon(shapes, config)
        start = owned[1].weight.clone()
        gradients = make_gradients(shapes, 1)
        if bad is not None:
            gradients[0][1][3, 4] = bad
        results[bad] = run(optimizer, owned, gradients, 0.02)
        assert optimizer.non_finite() == ([] if bad is None else ["matrix.1"])
        assert optimizer.num_non_finite().item() == (0 if bad is None else 1)
        if bad is not None:
            torch.testing.assert_close(owned[1].weight, start * (1 - 0.02 * 0.1))
            for i in (0, 2):
                assert np.array_equal(results[bad][i], results[None][i])


def test_bf16_weights_have_fp32_masters_that_small_updates_add_up_in() -> None:
    config = OptimizerConfig(lr=1e-5, weight_decay=0.0, muon=MuonConfig(precision="fp32"))
    _, wide = make_muon([(8, 12)], config)
    narrow = [OwnedPiece(wide[0].piece, wide[0].weight.bfloat16(), wide[0].gradient)]
    optimizer = Muon(config.muon, narrow, POLAR_EXPRESS)
    gradients = make_gradients([(8, 12)], 1) * 50
    start = narrow[0].weight.float().numpy().reshape(8, 12)
    run(optimizer, narrow, gradients, 1e-5)
    (master,) = optimizer.state()["master"]
    right = reference(start, [g[0] for g in gradients], 1e-5, decay=0.0)
    assert error(master.tensor.view(8, 12).numpy(), right) < 2e-6
    assert torch.equal(narrow[0].weight, master.tensor.bfloat16())


def test_agrees_with_torch_where_the_definitions_coincide() -> None:
    """torch's has one triple of coefficients, bfloat16, no 1.01, and a momentum that is (1 - mu) times ours."""
    triple = (3.4445, -4.7750, 2.0315)
    first = (triple[0] * 1.01, triple[1] * 1.01**3, triple[2] * 1.01**5)
    shapes = [(24, 40), (40, 24)]
    config = OptimizerConfig(lr=0.02, muon=MuonConfig(precision="bf16"))
    with mock.patch.object(muon, "polar_express_rows", lambda steps: (first, *[triple] * 4)):
        optimizer, owned = make_muon(shapes, config)
    theirs = [torch.nn.Parameter(p.weight.view(p.piece.matrix.shape).clone()) for p in owned]  # type: ignore[union-attr]
    start = [p.detach().clone() for p in theirs]
    engine = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw", ns_steps=5
    )
    gradients = make_gradients(shapes, 3)
    for step in gradients:
        for parameter, gradient in zip(theirs, step, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        engine.step()
    for own, right, before in zip(run(optimizer, owned, gradients, 0.02), theirs, start, strict=True):
        moved, expected = torch.from_numpy(own) - before, right.detach() - before
        assert float((moved - expected).norm() / expected.norm()) < 2e-2


def test_a_piece_that_is_no_matrix_is_refused() -> None:
    config = OptimizerConfig(lr=0.02)
    _, owned = make_muon([(8, 12)], config)
    piece = owned[0].piece
    cut = OwnedPiece(Piece(piece.shard, 0, 48, piece.rule, 0, None), owned[0].weight[:48], owned[0].gradient[:48])
    with pytest.raises(ValueError, match=r"matrix\.0 is no logical matrix"):
        Muon(config.muon, [cut], POLAR_EXPRESS)


# ------------------------------------------------------------------------- the model's logical matrices


def test_every_logical_matrix_of_the_model_is_orthogonalised_by_itself(pool: WorkerPool) -> None:
    """Q, K, V, head gate, gate and up, every expert: against a reference that sees logical matrices alone."""
    lr = 0.02
    ((before, gradients, after),) = pool.run(1, muon_runs.one_step, lr, ["optimizer.muon.precision=fp32"])
    start, right, own = assemble([before]), assemble([gradients]), assemble([after])
    roles = {m.name: m.role for p in muon_spec().parameters() for m in p.matrices}
    seen = set()
    for name, gradient in right.items():
        role = roles[name]
        if role not in HIDDEN_MATRICES:
            continue
        seen.add(role)
        stack = range(len(gradient)) if gradient.ndim == 3 else [...]
        for expert in stack:
            expected = reference(start[name][expert].numpy(), [gradient[expert].numpy()], lr)
            assert error(own[name][expert].numpy(), expected) < 1e-5, (name, expert)
    assert seen == HIDDEN_MATRICES


def muon_spec() -> Any:
    from steptron.config.loader import load
    from steptron.model.layer_spec import model_spec

    return model_spec(load(layouts.NANO, []).config.model)


# -------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "DP2": (2, []),
    "DP4": (4, []),
    "EP2xDP2": (4, ["parallel.expert=2"]),
    "PP2xDP2": (4, ["parallel.pipeline=2"]),
    "TP2xDP2": (4, ["parallel.tensor=2"]),
}
OWNERS = {
    **LAYOUTS,
    "PP2xVPP2xDP2": (4, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "DP4 by nodes": (4, ["parallel.node_size=2"]),
    "DP2, all-reduced": (2, ["optimizer.sharding.reduction=all_reduce"]),
    "DP4, all reduce-scattered": (4, ["optimizer.sharding.reduction=reduce_scatter"]),
}
LR = 1e-3
ALL_EXPERTS = "model.moe.top_k=8"
"""Every token goes to every expert: rounding cannot change a selection, which would change far more than itself."""


@functools.cache
def given_to_one_process(pool: WorkerPool, kernels: str) -> Any:
    (one,) = pool.run(1, muon_runs.given_gradients, [*DETERMINISTIC, f"train.kernels={kernels}"], 2, 1.0)
    return one


DETERMINISTIC = ["train.deterministic=true", "optimizer.muon.precision=fp16"]


@pytest.mark.parametrize(
    "name, kernels",
    [*((name, "native") for name in OWNERS), ("DP4", "plain"), ("EP2xDP2", "plain"), ("TP2xDP2", "plain")],
)
def test_equal_gradients_give_equal_bits_whoever_owns_what(pool: WorkerPool, name: str, kernels: str) -> None:
    """In float16, the norm and clipping included: a rank's matrices are orthogonalised alike whatever else it owns."""
    world_size, overrides = OWNERS[name]
    right, norms = given_to_one_process(pool, kernels)
    settings = [*overrides, *DETERMINISTIC, f"train.kernels={kernels}"]
    results = pool.run(world_size, muon_runs.given_gradients, settings, 2, 1.0)
    assert all(own_norms == norms for _, own_norms in results)
    own, expected = assemble([parts for parts, _ in results]), assemble([right])
    assert own.keys() == expected.keys()
    assert not [matrix for matrix, value in expected.items() if not torch.equal(own[matrix], value)]


@functools.cache
def ten_steps_of_one_process(pool: WorkerPool, precision: str) -> Outcome:
    return ten_steps(pool, 1, [], precision)[0]


def ten_steps(pool: WorkerPool, world_size: int, overrides: list[str], precision: str) -> list[Outcome]:
    settings = [*muon_runs.MUON, ALL_EXPERTS, f"optimizer.muon.precision={precision}", *overrides]
    outcomes: list[Outcome] = pool.run(world_size, layouts.run, settings, 10, None, buckets.BUCKET_ELEMENTS, LR)
    return outcomes


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("fp16", 2e-3)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_are_those_of_one_process(pool: WorkerPool, name: str, precision: str, tolerance: float) -> None:
    """Free-running: gradients are added up in another order. Measured, worst relative difference of a tensor: float32
    3.5e-7 (TP 2.2e-6), float16 2.4e-4, whose losses differ by 5e-7."""
    world_size, overrides = LAYOUTS[name]
    one = ten_steps_of_one_process(pool, precision)
    outcomes = ten_steps(pool, world_size, overrides, precision)
    own, right = assemble([outcome.parameters for outcome in outcomes]), assemble([one.parameters])
    for outcome in outcomes:
        for mine, theirs in zip(outcome.losses, one.losses, strict=True):
            assert mine.total == pytest.approx(theirs.total, abs=1e-5)
    for matrix, value in right.items():
        assert error(own[matrix].numpy(), value.numpy()) <= tolerance or not value.any(), matrix
