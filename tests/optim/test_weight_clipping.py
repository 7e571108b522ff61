"""Weight clipping of experts' projections: which are scaled, by how much, and that all copies of them agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steptron.checkpoint import loading, saving
from steptron.checkpoint.folder import checkpoint_folder
from steptron.checkpoint.manifest import Progress
from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec
from steptron.model.parameter_shards import Place, shard
from steptron.optim.buffer_plan import plan_buffers
from steptron.optim.build import build_optimizer
from steptron.optim.owned import OwnedPiece
from steptron.optim.weight_clipping import Clipped, clip_weights
from steptron_kernels.polar_express import plain
from tests.optim.muon_runs import build, make_batches
from tests.parallel.layouts import Part, assemble, parts_of
from tests.worker_pool import WorkerPool

E, F, H = 3, 4, 8
PREFIX = "layers.1.ffn.experts"
GATE_UP = ParameterSpec(
    f"{PREFIX}.gate_up_projection",
    (E, 2 * F, H),
    (
        LogicalMatrix(f"{PREFIX}.gate.weight", ParameterRole.EXPERT_GATE, (0, F)),
        LogicalMatrix(f"{PREFIX}.up.weight", ParameterRole.EXPERT_UP, (F, 2 * F)),
    ),
)
DOWN = ParameterSpec(
    f"{PREFIX}.down_projection", (E, H, F), (LogicalMatrix(f"{PREFIX}.down.weight", ParameterRole.EXPERT_DOWN, (0, H)),)
)
SHARED = ParameterSpec(
    "layers.1.ffn.shared.down_projection.weight",
    (H, F),
    (LogicalMatrix("layers.1.ffn.shared.down.weight", ParameterRole.SHARED_DOWN, (0, H)),),
)
ROUTER = ParameterSpec(
    "layers.1.ffn.router.weight", (E, H), (LogicalMatrix("layers.1.ffn.router.weight", ParameterRole.ROUTER, (0, E)),)
)
SPECS = [GATE_UP, DOWN, SHARED, ROUTER]


class Ranks:
    """Parameters, and the optimizers of all ranks that share them, on one process."""

    def __init__(self, name: str, ranks: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            spec.name: torch.nn.Parameter(torch.randn(spec.shape, generator=generator).to(dtype)) for spec in SPECS
        }
        config = OptimizerConfig(lr=1.0, name=name)  # type: ignore[arg-type]
        plans = plan_buffers([shard(spec, Place()) for spec in SPECS], config, 1, {"dp_cp": ranks, "expt_dp": ranks})
        self.owned: list[list[OwnedPiece]] = [[] for _ in range(ranks)]
        for piece in (piece for plan in plans for piece in plan.pieces):
            weight = self.parameters[piece.shard.parameter.name].detach().view(-1)[piece.start : piece.stop]
            self.owned[piece.owner].append(OwnedPiece(piece, weight, torch.zeros(weight.shape)))
        self.optimizers = [build_optimizer(config, owned, plain.polar_express) for owned in self.owned]

    def clip(self, maxima: torch.Tensor, threshold: float) -> list[Clipped]:
        pairs = zip(self.optimizers, self.owned, strict=True)
        return [item for pair in pairs for item in clip_weights(*pair, {PREFIX: maxima}, threshold)]

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def factors(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every entry is to be multiplied by: gate_up [E, 2], down [E]."""
    return {
        GATE_UP.name: gate_up.repeat_interleave(F, dim=1)[:, :, None].expand(GATE_UP.shape),
        DOWN.name: down[:, None, None].expand(DOWN.shape),
        SHARED.name: torch.ones(SHARED.shape),
        ROUTER.name: torch.ones(ROUTER.shape),
    }


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_each_projection_is_scaled_by_its_own_maximum(name: str, ranks: int) -> None:
    """Wherever pieces begin and end; a maximum at the bound or below it scales nothing."""
    world = Ranks(name, ranks, torch.float32)
    before = world.values()
    maxima = torch.tensor([[8.0, 2.0, 3.0], [2.0, 0.0, 20.0], [1.999, 2.5, 2.0]])
    clipped = world.clip(maxima, 2.0)
    expected = factors(torch.tensor([[0.25, 1.0], [1.0, 1.0], [1.0, 0.8]]), torch.tensor([2 / 3, 0.1, 1.0]))
    for parameter, value in world.values().items():
        wanted = before[parameter] * expected[parameter]
        torch.testing.assert_close(value, wanted, rtol=2e-7, atol=0)
        untouched = expected[parameter] == 1.0
        assert torch.equal(value[untouched], before[parameter][untouched])
    assert sorted((item.name, item.largest) for item in clipped) == [
        (f"{PREFIX}.down.weight[0]", 3.0),
        (f"{PREFIX}.down.weight[1]", 20.0),
        (f"{PREFIX}.gate.weight[0]", 8.0),
        (f"{PREFIX}.up.weight[2]", 2.5),
    ]


def test_outputs_that_are_not_finite_are_named_and_scale_nothing() -> None:
    world = Ranks("muon", 2, torch.float32)
    before = world.values()
    maxima = torch.zeros(E, 3)
    maxima[1, 0], maxima[2, 2] = float("inf"), float("nan")
    clipped = world.clip(maxima, 1.0)
    assert sorted(item.name for item in clipped) == [f"{PREFIX}.down.weight[2]", f"{PREFIX}.gate.weight[1]"]
    assert all(torch.equal(value, before[name]) for name, value in world.values().items())


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_fp32_weights_behind_bf16_parameters_are_scaled_too(name: str) -> None:
    """And are not rounded on the way: parameters are their roundings."""
    world = Ranks(name, 2, torch.bfloat16)
    states = [state for optimizer in world.optimizers for state in optimizer.state()["master"]]
    for state in states:
        state.tensor.add_(1e-4)  # between bf16 numbers
    before = [state.tensor.clone() for state in states]
    world.clip(torch.tensor([[3.0, 3.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 1.0)
    scaled = 0
    for state, old in zip(states, before, strict=True):
        piece = state.owned.piece
        is_expert = piece.shard.parameter.is_expert
        size = 2 * F * H if piece.shard.parameter is GATE_UP else H * F
        first = torch.arange(piece.start, piece.stop) < size if is_expert else torch.zeros(old.shape, dtype=torch.bool)
        torch.testing.assert_close(state.tensor[first], old[first] / 3, rtol=2e-7, atol=0)
        assert torch.equal(state.tensor[~first], old[~first])
        assert torch.equal(state.owned.weight[first], state.tensor[first].bfloat16())
        scaled += int(first.sum())
    assert scaled == 3 * F * H


# ------------------------------------------------------------------------------------------- a run

ADAMW = ["optimizer.name=adamw"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "DP2": (2, []),
    "EP2xDP2": (4, ["parallel.expert=2"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "TP2xEP2, AdamW": (2, ["parallel.tensor=2", "parallel.expert=2", *ADAMW]),
}
Outcome = tuple[dict[str, Part], dict[str, Part], list[Clipped], dict[str, torch.Tensor]]


def clip_run(rank: int, world_size: int, overrides: list[str], threshold: float, precision: str) -> Outcome:
    """Parameters before and after the clipping that follows a step without an update; what was clipped; the maxima of a
    forward pass after it."""
    settings = [f"optimizer.weight_clipping.threshold={threshold}", f"train.precision={precision}"]
    train = build(world_size, [*settings, *overrides])
    clipping, batches = train.weight_clipping, make_batches()[train.mesh.data_rank :: train.mesh.data_size]
    assert clipping is not None

    def parameters() -> dict[str, Part]:
        tensors = {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}
        return parts_of(train.spec, train.mesh.place, tensors)

    train.accumulate_gradients(batches)
    before = parameters()
    clipped = clipping.apply()
    assert not any(maximum.any() for maximum in clipping._norms.maxima.values())  # they start again
    train.accumulate_gradients(batches)
    clipping._norms.combine(train.mesh.groups.expt_dp)
    return before, parameters(), clipped, dict(clipping._norms.maxima)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def alone(pool: WorkerPool, request: pytest.FixtureRequest) -> tuple[str, Outcome]:
    (outcome,) = pool.run(1, clip_run, [], THRESHOLD, request.param)
    return request.param, outcome


THRESHOLD = 0.35


def test_what_is_clipped_reaches_the_bound_and_nothing_else_changes(alone: tuple[str, Outcome]) -> None:
    """In the first MoE layer, whose inputs do not depend on other experts."""
    precision, (before, after, clipped, maxima) = alone
    names = {item.name for item in clipped}
    assert 0 < len(names) == len(clipped) < 7 * 8 * 3
    assert {name.split(".")[-2] for name in names} == {"gate", "up"} and all(i.largest > THRESHOLD for i in clipped)
    rounding = 1e-6 if precision == "fp32" else 2**-8
    for matrix, part in before.items():
        for expert in range(8 if "experts" in matrix else 1):
            name = f"{matrix}[{expert}]"
            old, new = (p[matrix].tensor[expert] if "experts" in matrix else p[matrix].tensor for p in (before, after))
            if name not in names:
                assert torch.equal(old, new), name
                continue
            (item,) = (item for item in clipped if item.name == name)
            torch.testing.assert_close(new, (old.float() * (THRESHOLD / item.largest)).to(new.dtype))
            if matrix.startswith("layers.2."):
                column = ("gate", "up", "down").index(matrix.split(".")[-2])
                largest = float(maxima["layers.2.ffn.experts"][expert, column])
                assert largest == pytest.approx(THRESHOLD, rel=rounding)
        assert part.tensor.shape == after[matrix].tensor.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_clip_alike(pool: WorkerPool, layout: str) -> None:
    """``assemble`` refuses replicas that differ in a bit. Ranks look at their own tokens only: without the maximum over
    expert-data ranks their factors would differ."""
    ((_, after, clipped, _),) = pool.run(1, clip_run, [], THRESHOLD, "fp32")
    world_size, overrides = LAYOUTS[layout]
    results = pool.run(world_size, clip_run, overrides, THRESHOLD, "fp32")
    assert all(result[2] == results[0][2] for result in results)
    expected = {item.name: item.largest for item in clipped}
    own = {item.name: item.largest for item in results[0][2]}
    assert len(own) == len(results[0][2])
    for name in own.keys() | expected.keys():
        assert own.get(name, THRESHOLD) == pytest.approx(expected.get(name, THRESHOLD), rel=1e-5), name
    whole = assemble([result[1] for result in results])
    for name, part in after.items():
        torch.testing.assert_close(whole[name], part.tensor, rtol=1e-5, atol=0)


def test_bf16_replicas_have_the_same_bits(pool: WorkerPool) -> None:
    """Only owners have fp32 weights: others could not round the scaled weight as they do."""
    results = pool.run(4, clip_run, ["parallel.expert=2"], THRESHOLD, "bf16")
    assert results[0][2] and all(result[2] == results[0][2] for result in results)
    before, after = (assemble([result[index] for result in results]) for index in (0, 1))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {item.name.partition("[")[0] for item in results[0][2]}


def resumed(rank: int, world_size: int, output: str, middle: str) -> tuple[dict[str, torch.Tensor], int]:
    """Two steps, clipping with a checkpoint, two steps, clipping: in one go, or from that checkpoint."""
    train = build(world_size, ["optimizer.weight_clipping.threshold=0.3", f"train.output={output}"])
    batches, count = make_batches()[train.mesh.data_rank :: train.mesh.data_size], 0
    assert train.weight_clipping is not None
    if middle == "save":
        for _ in range(2):
            train.run(batches, 1e-2, 1e-3)
        assert train.weight_clipping.apply()
        saving.save(train.config, Progress(2, 0, 0), [], train.chunks, train.optimizer, train.mesh)
    else:
        loading.load(checkpoint_folder(train.config.train.output, 2), train.chunks, train.optimizer, train.mesh)
    for _ in range(2):
        train.run(batches, 1e-2, 1e-3)
    count = len(train.weight_clipping.apply())
    return {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}, count


def test_a_resumed_run_goes_on_as_it_would_have(pool: WorkerPool, tmp_path: Any) -> None:
    through = pool.run(2, resumed, str(tmp_path), "save")
    again = pool.run(2, resumed, str(tmp_path), "load")
    for (expected, count), (own, own_count) in zip(through, again, strict=True):
        assert count == own_count > 0
        assert [name for name in expected if not torch.equal(expected[name], own[name])] == []


def packed(rank: int, world_size: int) -> tuple[float, float]:
    """Loss after clipping with the native operations, whose packed weights are copies, and with the plain ones."""
    losses = []
    train = build(world_size, ["optimizer.weight_clipping.threshold=0.1", "train.kernels=native"])
    batches = make_batches()
    losses.append(train.accumulate_gradients(batches).losses.lm)
    assert train.weight_clipping is not None and train.weight_clipping.apply()
    losses.append(train.accumulate_gradients(batches).losses.lm)
    for chunk in train.chunks:
        for module in chunk.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                fresh = torch.nn.Parameter(parameter.detach().clone())
                fresh.main_grad = torch.zeros_like(fresh)  # type: ignore[attr-defined]
                setattr(module, name, fresh)  # no packed copy knows it
    sums, counts = train.evaluate(batches)
    losses.append(float(sums[0]) / counts.targets[0])
    assert abs(losses[0] - losses[1]) > 1e-3
    return losses[1], losses[2]


def test_packed_copies_follow(pool: WorkerPool) -> None:
    ((after, fresh),) = pool.run(1, packed)
    assert after == pytest.approx(fresh, rel=1e-7)
