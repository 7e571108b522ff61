"""TrainStep on several processes: evaluation, frozen routers, failures on one rank, document options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from steptron.config.loader import load
from steptron.data.batch import MicroBatch
from steptron.parallel.mesh import build_mesh
from steptron.train.step import NonFiniteError, RejectedStep, TrainStep
from tests.parallel.layouts import LEARNING_RATE, NANO, make_batches, reduced_gradients
from tests.worker_pool import WorkerPool

LAYOUTS = {
    "one process": (1, []),
    "EP2": (2, ["parallel.expert=2"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "TP2xEP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "CP2xTP2": (4, ["parallel.context=2", "parallel.tensor=2"]),
}


def build(overrides: list[str]) -> tuple[TrainStep, list[MicroBatch]]:
    config = load(NANO, [*overrides, "data.sequence_length=48"]).config
    mesh = build_mesh(config.parallel)
    return TrainStep(config, mesh, torch.device("cpu")), make_batches()[mesh.data_rank :: mesh.data_size]


def parameters_of(train: TrainStep) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}


def train_and_evaluate(
    rank: int, world_size: int, overrides: list[str]
) -> tuple[list[float], list[float], bool, dict[str, torch.Tensor]]:
    """Losses by training and by evaluation; whether evaluation left gradients alone; parameters after
    two steps with an evaluation between them."""
    train, batches = build(overrides)
    losses = train.accumulate_gradients(batches).losses
    buffers = list(train.sharded.gradients)
    before = [buffer.data.clone() for buffer in buffers]
    sums, counts = train.evaluate(batches)
    untouched = all(torch.equal(a, buffer.data) for a, buffer in zip(before, buffers, strict=True))
    means = [total / count for total, count in zip(sums.tolist(), counts.targets, strict=True)]
    train.run(batches, LEARNING_RATE, 1e-3)
    train.evaluate(batches)
    train.run(batches, LEARNING_RATE, 1e-3)
    return [losses.lm, *losses.mtp], means, untouched, parameters_of(train)


def only_train(rank: int, world_size: int, overrides: list[str]) -> dict[str, torch.Tensor]:
    train, batches = build(overrides)
    for _ in range(2):
        train.run(batches, LEARNING_RATE, 1e-3)
    return parameters_of(train)


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_gives_the_training_losses_and_changes_nothing(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    evaluated = pool.run(world_size, train_and_evaluate, overrides)
    plain = pool.run(world_size, only_train, overrides)
    for (trained, means, untouched, parameters), expected in zip(evaluated, plain, strict=True):
        assert trained == pytest.approx(means, rel=1e-7)
        assert untouched
        assert [key for key in expected if not torch.equal(parameters[key], expected[key])] == []


def frozen(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Names of the tensors that two steps changed, and of the parameters that are trained."""
    train, batches = build(["balance.freeze_router=true", "balance.ep_loss_coefficient=0"])
    before = parameters_of(train)
    for _ in range(2):
        train.run(batches, LEARNING_RATE, bias_rate=1e-3)
    changed = [name for name, tensor in parameters_of(train).items() if not torch.equal(tensor, before[name])]
    return changed, sorted({piece.piece.shard.parameter.name for piece in train.sharded.owned})


def test_a_frozen_router_keeps_weights_and_biases_and_everything_else_trains(pool: WorkerPool) -> None:
    ((changed, trained),) = pool.run(1, frozen)
    assert not any(".router." in name for name in changed)
    assert sorted(changed) == trained


def step_with_nan_on_the_last_rank(rank: int, world_size: int, overrides: list[str]) -> tuple[str, bool]:
    train, batches = build(overrides)
    before = parameters_of(train)
    if rank == world_size - 1:
        name, parameter = next(
            (name, p) for name, p in train.chunks.named_parameters() if name.endswith("query_norm.weight")
        )
        before[name] = parameter.data.fill_(math.nan).clone()
    try:
        train.run(batches, LEARNING_RATE, 1e-3)
    except NonFiniteError as error:
        after = parameters_of(train)
        return str(error), all(torch.equal(after[key].nan_to_num(), before[key].nan_to_num()) for key in before)
    return "", False


@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_on_one_rank_stops_all_with_the_same_message_and_updates_nothing(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, step_with_nan_on_the_last_rank, overrides)
    assert len({message for message, _ in outcomes}) == 1
    assert "Parameters with non-finite gradients: " in outcomes[0][0] and "attention" in outcomes[0][0]
    assert all(untouched for _, untouched in outcomes)


def rejected_step(rank: int, world_size: int) -> tuple[int, list[bool]]:
    """Projections that have been seen by the rank, and whether a rejected step has left what was seen of them."""
    train, batches = build(["optimizer.weight_clipping.threshold=1.0", "parallel.expert=2"])
    assert train.weight_clipping is not None
    seen = train.weight_clipping._norms.maxima
    train.run(batches, LEARNING_RATE, 1e-3)
    before = {name: maximum_E3.clone() for name, maximum_E3 in seen.items()}
    for name, parameter in train.chunks.named_parameters():
        if name == "layers.1.ffn_norm.weight":
            parameter.data *= 100.0
    with pytest.raises(RejectedStep):
        train.run(batches, LEARNING_RATE, 1e-3, judge=lambda loss: "no")
    kept = [torch.equal(before[name], maximum_E3) for name, maximum_E3 in seen.items()]
    train.run(batches, LEARNING_RATE, 1e-3)
    grown = [bool((maximum_E3 > before[name]).any()) for name, maximum_E3 in seen.items()]
    return sum(grown), kept


def test_weight_clipping_forgets_what_a_rejected_step_has_shown(pool: WorkerPool) -> None:
    for num_grown, kept in pool.run(2, rejected_step):
        assert num_grown > 0 and all(kept)


def bad_update(rank: int, world_size: int) -> tuple[str, str]:
    """What a run says of a momentum that is not finite, and after the state has been put back."""
    train, batches = build(["optimizer.name=muon"])
    momentum = train.optimizer.state()["momentum"][0].tensor
    momentum.fill_(math.nan)
    train.run(batches, LEARNING_RATE, 1e-3)
    said = []
    for _ in range(2):
        try:
            train.run(batches, LEARNING_RATE, 1e-3)
            said.append("")
        except NonFiniteError as error:
            said.append(str(error))
        momentum.zero_()
        train.optimizer.set_num_steps(0)  # as loading a checkpoint does
    first, second = said
    return first, second


def test_an_update_from_before_a_checkpoint_was_loaded_is_not_held_against_the_run(pool: WorkerPool) -> None:
    ((first, second),) = pool.run(1, bad_update)
    assert "was NaN or infinite in the step before" in first
    assert second == ""


def gradients_of(rank: int, world_size: int, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    train, _ = build(["balance.ep_loss_coefficient=0"])
    losses = train.accumulate_gradients(batches).losses
    return losses.lm, reduced_gradients(train)


def test_isolated_documents_give_what_the_same_documents_give_apart(pool: WorkerPool) -> None:
    """A packed row against one row per document; crossing attention gives something else."""
    (packed,) = make_batches(count=1, batch=1)
    documents = packed.documents_BS[0]
    rows = []
    for number in range(int(documents.max()) + 1):
        place = (documents == number).nonzero().flatten()
        start, stop = int(place[0]), int(place[-1]) + 1
        pad = torch.zeros(48 - (stop - start), dtype=torch.int64)

        def cut(
            values: torch.Tensor, fill: int, start: int = start, stop: int = stop, pad: torch.Tensor = pad
        ) -> torch.Tensor:
            return torch.cat([values[0, start:stop], (pad + fill).to(values.dtype)])

        rows.append(
            [
                cut(packed.tokens_BS, 0),
                cut(packed.labels_BS, 0),
                cut(packed.loss_mask_BS, 0),
                cut(packed.positions_BS, 0),
                torch.where(cut(packed.documents_BS, -1) >= 0, 0, -1),
            ]
        )
    apart = MicroBatch(*(torch.stack(column) for column in zip(*rows, strict=True)))
    assert len(rows) > 1
    crossing = replace(
        packed,
        positions_BS=torch.arange(48).unsqueeze(0),
        documents_BS=torch.where(packed.documents_BS >= 0, 0, -1),
    )
    ((loss, gradients),) = pool.run(1, gradients_of, [packed])
    ((loss_apart, gradients_apart),) = pool.run(1, gradients_of, [apart])
    ((loss_crossing, _),) = pool.run(1, gradients_of, [crossing])
    assert loss == pytest.approx(loss_apart, rel=1e-6)
    for name, gradient in gradients.items():
        assert float((gradient - gradients_apart[name]).norm() / gradient.norm()) < 2e-6, name
    assert abs(loss_crossing - loss) > 1e-4


def losses_without_targets(rank: int, world_size: int) -> tuple[float, float, bool]:
    train, (batch, *_) = build([])
    nothing = replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    result = train.run([nothing], LEARNING_RATE, 1e-3)
    finite = train.parameters_are_finite()
    next(iter(train.chunks.named_parameters()))[1].data.view(-1)[0] = math.inf
    return result.observed.losses.lm, result.observed.losses.total, finite and not train.parameters_are_finite()


def test_a_batch_without_targets_has_no_loss_to_report(pool: WorkerPool) -> None:
    """Not 0, the best loss there is; and the finiteness that guards checkpoints sees one bad value."""
    ((lm, total, guarded),) = pool.run(1, losses_without_targets)
    assert math.isnan(lm) and math.isfinite(total)
    assert guarded


def poisoned_momentum(rank: int, world_size: int) -> tuple[str, str, bool]:
    """What the step after a momentum has become infinite on one rank says, and whether its matrix has kept finite."""
    train, batches = build(["optimizer.name=muon"])
    own = batches[train.mesh.data_rank :: train.mesh.data_size]
    train.run(own, LEARNING_RATE, 0.0)
    (muon, _) = train.optimizer.members  # type: ignore[attr-defined]
    name = ""
    if rank == 0:
        state = muon.state()["momentum"][0]
        name = state.owned.name
        state.tensor[3] = math.inf
    train.run(own, LEARNING_RATE, 0.0)
    finite = all(bool(p.isfinite().all()) for _, p in train.chunks.named_parameters())
    try:
        train.run(own, LEARNING_RATE, 0.0)
    except NonFiniteError as error:
        return name, str(error), finite
    return name, "", finite


def test_momentum_that_is_not_finite_stops_all_ranks_by_name(pool: WorkerPool) -> None:
    (name, first, finite), (_, second, _) = pool.run(2, poisoned_momentum)
    assert finite and first == second and f"the update of {name} was NaN or infinite in the step before" in first


def total_and_lm(rank: int, world_size: int, overrides: list[str]) -> tuple[float, float, float | None]:
    train, batches = build(["loss.mtp_train_depths=0", *overrides])
    losses = train.accumulate_gradients(batches).losses
    return losses.total, losses.lm, losses.ep


def test_the_balance_loss_of_one_group_is_left_out(pool: WorkerPool) -> None:
    ((total, lm, ep),) = pool.run(1, total_and_lm, ["balance.ep_groups=null"])
    assert ep == pytest.approx(1.0) and total == pytest.approx(lm, rel=1e-12)
    ((total, lm, ep),) = pool.run(1, total_and_lm, ["balance.ep_groups=4"])
    assert ep is not None and total == pytest.approx(lm + 1e-3 * 7 * ep, rel=1e-6)
