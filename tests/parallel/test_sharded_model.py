"""A step with gradients reduced to owners and parameters gathered back, under Megatron's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.optim import buckets
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.replica_group import WholeGroup, Work
from steptron.train.step import TrainStep
from tests.parallel.layouts import NANO, make_batches
from tests.worker_pool import WorkerPool

ALL = set(range(2, 9))
"""nano's MoE layers."""
COMMON = ["data.sequence_length=48", "train.seed=10", "train.deterministic=true"]


def build(world_size: int, overrides: Sequence[str]) -> TrainStep:
    config = load(NANO, [*COMMON, *overrides]).config
    check(config, world_size)
    return TrainStep(config, build_mesh(config.parallel), torch.device("cpu"))


def trained(rank: int, world_size: int, overrides: Sequence[str], steps: int) -> dict[str, torch.Tensor]:
    """Parameters of this rank after some steps."""
    train = build(world_size, overrides)
    own = make_batches()[train.mesh.data_rank :: train.mesh.data_size]
    for _ in range(steps):
        train.run(own, 1e-2, 1e-3)
    return {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}


@pytest.mark.parametrize(
    "settings", [["optimizer.name=muon", "optimizer.muon.precision=fp32"], ["optimizer.name=adamw"]], ids=str
)
def test_native_kernels_see_what_others_have_updated(pool: WorkerPool, settings: list[str]) -> None:
    """They keep packed copies of weights: a gather must make them anew, or half of every weight would be an old one."""
    native = pool.run(2, trained, [*settings, "train.kernels=native"], 2)
    plain = pool.run(2, trained, [*settings, "train.kernels=plain"], 2)
    for own, other in zip(native, plain, strict=True):
        errors = {name: float((own[name] - other[name]).norm() / other[name].norm().clamp(min=1e-3)) for name in own}
        assert {name: error for name, error in errors.items() if error > 2e-4} == {}


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
def test_who_owns_what_and_when_it_comes_back_changes_no_bit(pool: WorkerPool, optimizer: str) -> None:
    """Sums of two are the same in any order, so that all ways to share the work must agree to the bit."""
    settings = [f"optimizer.name={optimizer}"]
    reference = pool.run(2, trained, [*settings, "optimizer.sharding.overlap_gather=false"], 2)
    assert reference[0].keys() == reference[1].keys()
    assert all(torch.equal(reference[0][name], reference[1][name]) for name in reference[0])
    for choice in ("reduction=reduce_scatter", "reduction=all_reduce", "max_padding=0.0"):
        ranks = pool.run(2, trained, [*settings, f"optimizer.sharding.{choice}"], 2)
        for own in ranks:
            assert [name for name in own if not torch.equal(own[name], reference[0][name])] == [], choice


def reading(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether parameters are those of the owners: right after a step, and when ``chunks`` has been asked for."""
    train = build(world_size, ["optimizer.name=adamw"])
    hidden = {name: p for name, p in train.chunks.named_parameters() if "ffn" in name and p.dim() > 1}
    before = {name: p.detach().clone() for name, p in hidden.items()}
    late: list[_Late] = []
    with mock.patch("steptron.parallel.replica_group.all_gather", lambda out, own, **_: _late(out, own, late)):
        train.run(make_batches()[rank::world_size], 1e-2, 1e-3)
        # AdamW moves nearly every weight: where one did not, another rank owns it.
        early = all(bool((p != before[name]).float().mean() > 0.6) for name, p in hidden.items())
        parameters = dict(train.chunks.named_parameters())
    read = all(bool((parameters[name] != before[name]).float().mean() > 0.9) for name in hidden)
    return early, read


class _Late:
    """A gather that nothing brings on but its ``wait``."""

    def __init__(self, out: torch.Tensor, own: torch.Tensor) -> None:
        self.out, self.own = out, own.clone()

    def wait(self) -> None:
        parts = [torch.empty_like(self.own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.own)
        self.out.copy_(torch.cat(parts))


def _late(out: torch.Tensor, own: torch.Tensor, late: list[_Late]) -> _Late:
    late.append(_Late(out, own))
    return late[-1]


def test_asking_for_the_model_waits_for_it(pool: WorkerPool) -> None:
    assert pool.run(2, reading) == [(False, True)] * 2


class Watched(WholeGroup):
    """Notes what is started over a group."""

    def __init__(self, group: dist.ProcessGroup, name: str, started: list[tuple[str, str, int]]) -> None:
        super().__init__(group)
        self.name, self.started = name, started

    def all_reduce(self, data: torch.Tensor) -> Work:
        self.started.append((self.name, "all_reduce", data.numel()))
        return super().all_reduce(data)

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        self.started.append((self.name, "reduce_scatter", data.numel()))
        return super().reduce_scatter(data)

    def all_gather(self, data: torch.Tensor) -> Work:
        self.started.append((self.name, "all_gather", data.numel()))
        return super().all_gather(data)


def watched_steps(
    rank: int, world_size: int, overrides: Sequence[str]
) -> tuple[int, list[tuple[str, str, int]], list[tuple[str, list[str]]], int]:
    """Of one step: the pipeline stage, what is started, the buffers, and reductions started before finalisation."""
    started: list[tuple[str, str, int]] = []
    before: list[int] = []
    with (
        mock.patch.object(buckets, "BUCKET_ELEMENTS", 20_000),
        mock.patch.object(Mesh, "replicas", lambda mesh, name: Watched(getattr(mesh.groups, name), name, started)),
    ):
        train = build(world_size, overrides)
    finalize = train.engine_config.finalize_model_grads_func

    def note(*args: object, **kwargs: object) -> None:
        before.append(len(started))
        finalize(*args, **kwargs)

    train.engine_config.finalize_model_grads_func = note
    train.run(make_batches()[train.mesh.data_rank :: train.mesh.data_size], 1e-2, 1e-3)
    buffers = [(plan.title, [own.parameter.name for own in plan.shards]) for plan in train.sharded.plans]
    return train.mesh.pipeline_rank, started, buffers, before[0]


@pytest.mark.parametrize(
    "layout, moe_layers",
    [
        # Four chunks of layers 0 to 2, 3 and 4, 5 and 6, 7 and 8; layers 0 and 1 are dense.
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], [{2, 5, 6}, {3, 4, 7, 8}]),
        (["parallel.pipeline=2"], [{2, 3, 4}, {5, 6, 7, 8}]),
        (["parallel.expert=2"], [ALL]),
        (["parallel.tensor=2"], [ALL]),
        (["parallel.context=2", "balance.freeze_router=true", "loss.mtp_train_depths=0"], [ALL]),
    ],
    ids=["PP2xVPP2xDP2", "PP2xDP2", "DP2xEP2", "TP2xDP2", "CP2xDP2, router frozen, without MTP"],
)
def test_replicas_start_the_same_in_the_same_order(
    pool: WorkerPool, layout: list[str], moe_layers: list[set[int]]
) -> None:
    """Whatever reaches which rank first; reductions start while the backward pass runs."""
    ranks = pool.run(4, watched_steps, ["optimizer.name=muon", *layout])
    for stage in {stage for stage, *_ in ranks}:
        first, *others = [started for own, started, _, _ in ranks if own == stage]
        for other in others:
            for group in ("expt_dp", "dp_cp", "tp_dp_cp"):
                assert [s for s in first if s[0] == group] == [s for s in other if s[0] == group]
    for stage, started, buffers, before in ranks:
        reductions = [kind for _, kind, _ in started if kind != "all_gather"]
        assert 0 < before <= len(reductions) and before >= 0.4 * len(reductions)
        experts = [names for title, names in buffers if "expt_dp" in title]
        assert len(experts) == 1, "one buffer, whatever the number of model chunks"
        layers = [int(name.split(".")[1]) for name in experts[0]]
        assert layers == sorted(layers, reverse=True)
        assert set(layers) == moe_layers[stage]
