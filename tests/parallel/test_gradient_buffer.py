"""Gradient buffers: accumulation, the order of reductions, and sums over ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steptron.config.schema import OptimizerConfig, ParallelConfig, ShardingConfig
from steptron.data.batch import MicroBatch
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec, model_spec
from steptron.model.parameter_shards import Place, shard
from steptron.model.stages import Stage, split_stages
from steptron.optim import buckets, ownership
from steptron.optim.buffer_plan import BufferPlan, plan_buffers
from steptron.optim.ownership import Reduction
from steptron.parallel.gradient_buffer import GradientBuffer, GradientBuffers
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.replica_group import ReplicaGroup, WholeGroup, Work
from steptron.parallel.sharded_model import ShardedModel
from tests.model.helpers import build_model, fill, gradients, random_batch, relative_error, single_process, small_config
from tests.parallel.layouts import sharded_by
from tests.worker_pool import WorkerPool

SHAPES = [(3, 4), (5,), (2, 2, 2), (7, 1), (6,)]


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{i}": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for i, shape in enumerate(SHAPES)
    }


def plans_for(
    parameters: dict[str, torch.nn.Parameter],
    ranks: int = 1,
    reduction: str = "reduce_scatter",
    role: ParameterRole = ParameterRole.NORM,
) -> list[BufferPlan]:
    """Of vectors and the like, which may be cut anywhere, or of whole matrices."""
    specs = [
        ParameterSpec(name, tuple(p.shape), (LogicalMatrix(name, role, (0, p.shape[0])),))
        for name, p in parameters.items()
    ]
    config = OptimizerConfig(lr=1.0, sharding=ShardingConfig(reduction=reduction))
    return plan_buffers([shard(spec, Place()) for spec in specs], config, 1, {"dp_cp": ranks})


def make_buffers(
    parameters: dict[str, torch.nn.Parameter], group: ReplicaGroup | None = None, reduction: str = "reduce_scatter"
) -> GradientBuffers:
    group = group or WholeGroup(single_process().groups.dp)
    plans = plans_for(parameters, group.size(), reduction)
    return GradientBuffers([GradientBuffer(plan, parameters) for plan in plans], {"dp_cp": group})


def make_coefficients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def backward(parameters: dict[str, torch.nn.Parameter], seed: int, order: list[int] | None = None) -> None:
    """Leaves make_coefficients(seed) as gradients, one backward per parameter if an order is given."""
    coefficients, values = make_coefficients(seed), list(parameters.values())
    if order is None:
        sum((p * c).sum() for p, c in zip(values, coefficients, strict=True)).backward()
        return
    for index in order:
        (values[index] * coefficients[index]).sum().backward()


def test_main_grads_tile_the_buffer_and_accumulate_over_micro_batches() -> None:
    parameters = make_parameters()
    values = list(parameters.values())
    buffers = make_buffers(parameters)
    (buffer,) = buffers
    assert buffer.data.dtype is torch.float32 and buffer.data.numel() == sum(p.numel() for p in values)
    for parameter in values:
        assert parameter.main_grad.shape == parameter.shape
        assert parameter.main_grad.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
    for number, parameter in enumerate(values):
        parameter.main_grad.fill_(number)
    assert buffer.data.tolist() == [float(n) for n in (4, 3, 2, 1, 0) for _ in range(values[n].numel())]

    buffers.zero()
    for seed in (1, 2, 3):
        backward(parameters, seed)
        assert all(parameter.grad is None for parameter in values)
    buffers.finish()
    for index, parameter in enumerate(values):
        expected = sum(make_coefficients(seed)[index] for seed in (1, 2, 3))
        torch.testing.assert_close(parameter.main_grad, expected)
    buffers.zero()
    assert torch.count_nonzero(buffer.data) == 0
    backward(parameters, 4)
    torch.testing.assert_close(values[0].main_grad, make_coefficients(4)[0])


def test_bf16_gradients_accumulate_in_fp32() -> None:
    """256 small gradients on top of a large one: in bf16 each would be lost."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    buffers = make_buffers({"p": parameter})
    (parameter * 256).sum().backward()
    for _ in range(256):
        (parameter * 0.5).sum().backward()
    buffers.finish()
    assert parameter.main_grad.dtype is torch.float32 and parameter.main_grad.item() == 256 + 128


def test_a_parameter_used_twice_counts_both_uses() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    make_buffers({"p": parameter})
    (parameter * parameter + 2 * parameter).sum().backward()
    assert parameter.main_grad.item() == 8.0


def test_no_parameters() -> None:
    buffers = make_buffers({})
    buffers.zero()
    buffers.finish()
    assert list(buffers) == []


def test_a_parameter_of_another_shape_than_its_spec_is_refused() -> None:
    """It would lie over its neighbour's gradients."""
    parameters = make_parameters()
    (plan,) = plans_for(parameters)
    parameters["2"] = torch.nn.Parameter(torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match=r"^2 has shape \[2, 2, 3\], and \[2, 2, 2\] by its spec"):
        GradientBuffer(plan, parameters)


# -------------------------------------------------------------------------------- over ranks


ORDERS = {
    "same order": [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0]],
    "other order": [[4, 3, 2, 1, 0], [0, 2, 4, 1, 3]],
    "one rank misses some": [[4, 3, 2, 1, 0], [1, 3]],
    "one rank has none": [[4, 3, 2, 1, 0], []],
    "no rank has any": [[], []],
}


class Watched(WholeGroup):
    """Notes what is started, and with how many elements."""

    def __init__(self, group: dist.ProcessGroup, started: list[tuple[str, int]], name: str = "") -> None:
        super().__init__(group)
        self.started, self.name = started, name

    def all_reduce(self, data: torch.Tensor) -> Work:
        self.started.append((f"{self.name}all_reduce", data.numel()))
        return super().all_reduce(data)

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        self.started.append((f"{self.name}reduce_scatter", data.numel()))
        return super().reduce_scatter(data)


def whole_gradients(buffers: GradientBuffers, group: ReplicaGroup) -> None:
    """Gives what owners have to all."""
    for buffer in buffers:
        if buffer.plan.layout.reduction is Reduction.REDUCE_SCATTER:
            for span in buffer.plan.layout.spans:
                group.all_gather(buffer.data[span.start : span.stop]).wait()


def reduce_in_orders(
    rank: int, world_size: int, orders: list[list[int]], bucket_elements: int, reduction: str
) -> list[tuple[int, int, list[tuple[str, int]], list[torch.Tensor]]]:
    issued: list[tuple[str, int]] = []
    parameters = make_parameters()
    group = Watched(dist.group.WORLD, issued)
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket_elements), mock.patch.object(ownership, "ALIGNMENT", 1):
        buffers = make_buffers(parameters, group, reduction)
    steps = []
    for step in range(2):
        buffers.zero()
        issued.clear()
        buffers.sync_enabled = False  # the first micro-batch
        backward(parameters, seed=100 * step + rank)
        early = len(issued)
        buffers.sync_enabled = True  # the last one
        backward(parameters, seed=100 * step + 10 + rank, order=orders[rank])
        started = len(issued)
        buffers.finish()
        whole_gradients(buffers, group)
        steps.append((early, started, list(issued), [p.main_grad.clone() for p in parameters.values()]))
    return steps


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("bucket_elements, buckets", [(1, 5), (10, 3), (1 << 24, 1)])
def test_reductions_are_the_same_on_all_ranks_and_sum_both(
    pool: WorkerPool, orders: list[list[int]], bucket_elements: int, buckets: int, reduction: str
) -> None:
    ranks = pool.run(2, reduce_in_orders, orders, bucket_elements, reduction, timeout=60)
    for step in range(2):
        expected = []
        for index in range(len(SHAPES)):
            total = sum(make_coefficients(100 * step + rank)[index] for rank in range(2))
            for rank in range(2):
                if index in orders[rank]:
                    total = total + make_coefficients(100 * step + 10 + rank)[index]
            expected.append(total)
        issued = [rank[step][2] for rank in ranks]
        assert issued[0] == issued[1] and {kind for kind, _ in issued[0]} == {reduction}
        # Cut in two, spans of five and seven elements hold one more.
        padding = {5: 2, 3: 2, 1: 0}[buckets]
        assert len(issued[0]) == buckets and sum(size for _, size in issued[0]) == 12 + 5 + 8 + 7 + 6 + padding
        for rank in ranks:
            early, _, _, main_grads = rank[step]
            assert early == 0, "nothing is reduced before the last micro-batch"
            for own, right in zip(main_grads, expected, strict=True):
                torch.testing.assert_close(own, right)


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_reduce"])
def test_reductions_start_during_the_backward(pool: WorkerPool, reduction: str) -> None:
    (_, started, issued, _), _ = pool.run(2, reduce_in_orders, ORDERS["same order"], 1, reduction)[0]
    assert started == len(issued) == 5
    # A rank whose first bucket comes last starts all of them then, in the order of the buckets.
    (_, started, issued, _), _ = pool.run(2, reduce_in_orders, [[0, 1, 2, 3, 4]] * 2, 1, reduction)[0]
    assert started == 5 and [size for _, size in issued] == [6, 8, 8, 6, 12]


MIXED = [("a", (4, 6)), ("b", (5,)), ("c", (4, 6)), ("d", (3,)), ("e", (6, 4))]
"""Matrices and vectors in module order: they lie in two buffers over the same ranks."""


def two_buffers(rank: int, world_size: int, backward_order: list[str]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    issued: list[tuple[str, int]] = []
    group = Watched(dist.group.WORLD, issued)
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in MIXED}
    specs = [
        ParameterSpec(
            name,
            shape,
            (LogicalMatrix(name, ParameterRole.QUERY if len(shape) > 1 else ParameterRole.NORM, (0, shape[0])),),
        )
        for name, shape in MIXED
    ]
    config = OptimizerConfig(lr=1.0, sharding=ShardingConfig(reduction="reduce_scatter"))
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 1), mock.patch.object(ownership, "ALIGNMENT", 1):
        plans = plan_buffers([shard(spec, Place()) for spec in specs], config, 1, {"dp_cp": world_size})
    buffers = GradientBuffers([GradientBuffer(plan, parameters) for plan in plans], {"dp_cp": group})
    for name in backward_order if rank == 0 else sorted(backward_order):
        (parameters[name] * (rank + 1.0)).sum().backward()
    buffers.finish()
    whole_gradients(buffers, group)
    return issued, {name: p.main_grad.unique().tolist() for name, p in parameters.items()}


@pytest.mark.parametrize("order", ["edcba", "abcde", "cadeb", "e", ""])
def test_spans_of_several_buffers_over_the_same_ranks_have_one_order(pool: WorkerPool, order: str) -> None:
    """Whatever arrives first: matrices and other parameters are reduced in turn, as a backward pass completes them."""
    ranks = pool.run(2, two_buffers, list(order), timeout=60)
    assert ranks[0][0] == ranks[1][0]
    # Equal matrices fill spans in pairs, the last of them with padding: it is complete with "a".
    assert [size for _, size in ranks[0][0]] == [4, 48, 6, 48]
    for _, sums in ranks:
        assert sums == {name: [3.0] if name in order else [0.0] for name, _ in MIXED}


class _Started:
    def wait(self) -> None: ...


def test_only_spans_that_are_complete_are_reduced() -> None:
    """Of a chain of spans the second may be ready: it must wait for the first, on every rank."""
    parameters = make_parameters()
    group = mock.Mock()
    group.size.return_value = 2
    group.reduce_scatter.return_value = _Started()
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 10), mock.patch.object(ownership, "ALIGNMENT", 1):
        buffers = make_buffers(parameters, group)
    backward(parameters, 1, order=[2, 1, 0, 4])
    assert group.reduce_scatter.call_count == 0
    backward(parameters, 1, order=[3])
    assert group.reduce_scatter.call_count == 3
    buffers.finish()
    assert group.reduce_scatter.call_count == 3


def shard_model(
    mesh: Mesh, parallel: ParallelConfig, bucket_elements: int = 1 << 24, stage: Any = None, **changes: Any
) -> ShardedModel:
    model = build_model(small_config(), stage, mesh, parallel, **changes)
    fill(model, 0)
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket_elements), mock.patch.object(ownership, "ALIGNMENT", 1):
        return sharded_by(ModelChunks([model]), OptimizerConfig(lr=1.0), mesh)


def reduce_model(rank: int, world_size: int, expert: int, bucket_elements: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Gradients of two micro-batches per rank."""
    parallel = ParallelConfig(expert=expert)
    mesh = build_mesh(parallel)
    sharded = shard_model(mesh, parallel, bucket_elements)
    (wrapped,) = sharded.chunks
    sharded.gradients.zero()
    with sharded.no_sync():
        wrapped(micro_batch(2 * rank)).sum().backward()
    wrapped(micro_batch(2 * rank + 1)).sum().backward()
    sharded.finalize_gradients(sharded.chunks, pg_collection=mesh.groups)
    for buffer in sharded.gradients:
        whole_gradients([buffer], mesh.replicas(buffer.plan.replicas))  # type: ignore[arg-type]
    model = wrapped.module
    experts = {p.name for p in model.spec.parameters() if p.is_expert}
    first = mesh.expert_rank * 4 // mesh.expert_size
    return {name: (first if name in experts else 0, p.main_grad.clone()) for name, p in model.named_parameters()}


def micro_batch(seed: int) -> MicroBatch:
    return random_batch(48, 2, 12, seed, documents=[[12 - seed], [4, 3]])


@pytest.mark.parametrize("world_size, expert", [(2, 1), (2, 2), (4, 2)], ids=["DP2", "EP2", "DP2xEP2"])
@pytest.mark.parametrize("bucket_elements", [3000, 1 << 24])
def test_sums_over_ranks_are_those_of_one_process(
    pool: WorkerPool, world_size: int, expert: int, bucket_elements: int
) -> None:
    """Reductions that overlap with the dispatchers' own communication included."""
    model = build_model(small_config())
    fill(model, 0)
    for seed in range(2 * world_size):
        model(micro_batch(seed)).sum().backward()
    expected = gradients(model)
    ranks = pool.run(world_size, reduce_model, expert, bucket_elements)
    seen: dict[str, set[int]] = {}
    for rank in ranks:
        assert rank.keys() == expected.keys()
        for name, (first, own) in rank.items():
            right = (
                expected[name][first : first + own.shape[0]] if own.shape != expected[name].shape else expected[name]
            )
            assert relative_error(own, right) < 2e-6, name
            seen.setdefault(name, set()).add(first)
    experts = {p.name for p in model_spec(small_config()).parameters() if p.is_expert}
    assert {name for name, firsts in seen.items() if len(firsts) > 1} == (experts if expert > 1 else set())
    # Replicas hold the same bits.
    for name in expected:
        by_first: dict[int, torch.Tensor] = {}
        for rank in ranks:
            first, own = rank[name]
            assert torch.equal(by_first.setdefault(first, own), own), name


# ----------------------------------------------------------------------- copies of the embedding


def embedding_gradients(rank: int, world_size: int, mtp_depths: int, pipeline: int) -> torch.Tensor | None:
    """Each stage has its number + 1 as the gradient of its embedding on each rank, if it has one."""
    parallel = ParallelConfig(pipeline=pipeline)
    mesh = build_mesh(parallel)
    stage = split_stages(5, pipeline)[mesh.pipeline_rank]
    sharded = shard_model(mesh, parallel, stage=stage, mtp_depths=mtp_depths)
    model = sharded.chunks[0].module
    sharded.gradients.zero()
    if hasattr(model, "embedding"):
        model.embedding.weight.main_grad.fill_(mesh.pipeline_rank + 1.0)
    sharded.finalize_gradients(sharded.chunks, pg_collection=mesh.groups)
    for buffer in sharded.gradients:
        whole_gradients([buffer], mesh.replicas(buffer.plan.replicas))  # type: ignore[arg-type]
    return model.embedding.weight.main_grad.clone() if hasattr(model, "embedding") else None


@pytest.mark.parametrize("stages", [2, 4])
def test_both_copies_of_the_embedding_get_the_sum(pool: WorkerPool, stages: int) -> None:
    first, *between, last = pool.run(stages, embedding_gradients, 1, stages)
    assert first.unique().tolist() == last.unique().tolist() == [1.0 + stages]
    assert all(gradient is None for gradient in between)


def test_without_mtp_there_is_one_embedding_and_no_sum(pool: WorkerPool) -> None:
    first, last = pool.run(2, embedding_gradients, 0, 2)
    assert first.unique().tolist() == [1.0] and last is None


def test_copies_of_the_embedding_and_replicas_of_each(pool: WorkerPool) -> None:
    """The owner of a cell on one stage adds it up with the owner of the same cell on the other."""
    for gradient in pool.run(4, embedding_gradients, 1, 2):
        assert gradient is not None and gradient.unique().tolist() == [2 * (1.0 + 2.0)]


def test_a_single_stage_with_mtp_has_one_embedding() -> None:
    mesh = single_process()
    sharded = shard_model(mesh, ParallelConfig())
    model = sharded.chunks[0].module
    assert not any(plan.is_shared_embedding for plan in sharded.plans)
    model.embedding.weight.main_grad.fill_(3.0)
    sharded.finalize_gradients(sharded.chunks, pg_collection=mesh.groups)
    assert model.embedding.weight.main_grad.unique().tolist() == [3.0]


# --------------------------------------------------------------------------------- ShardedModel


def test_buffers_hold_every_trained_parameter_once_and_frozen_ones_not_at_all() -> None:
    sharded = shard_model(single_process(), ParallelConfig(), mtp_depths=1, freeze_router=True)
    model = sharded.chunks[0].module
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    held = [own.parameter.name for plan in sharded.plans for own in plan.shards]
    assert sorted(held) == sorted(trained)
    assert sum(buffer.data.numel() for buffer in sharded.gradients) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    without = {name for name, p in model.named_parameters() if not hasattr(p, "main_grad")}
    assert without == {name for name, p in model.named_parameters() if not p.requires_grad} != set()
    assert {piece.piece.shard.parameter.name for piece in sharded.owned} == trained


def test_no_sync_is_undone_after_an_error() -> None:
    sharded = shard_model(single_process(), ParallelConfig())
    with pytest.raises(RuntimeError, match="inside"), sharded.no_sync():
        assert not sharded.gradients.sync_enabled
        raise RuntimeError("inside")
    assert sharded.gradients.sync_enabled


def test_a_model_without_experts_has_no_expert_buffer() -> None:
    mesh = single_process()
    model = build_model(small_config(num_dense_layers=5, clamp={}))
    fill(model, 0)
    sharded = sharded_by(ModelChunks([model]), OptimizerConfig(lr=1.0), mesh)
    sharded.gradients.zero()
    sharded.chunks[0](random_batch(48, 1, 6, 0)).sum().backward()
    sharded.gradients.finish()
    assert {plan.replicas for plan in sharded.plans} == {"dp_cp"}
    assert all(torch.count_nonzero(buffer.data) > 0 for buffer in sharded.gradients)


def test_a_stage_without_parameters() -> None:
    """A pipeline stage may be empty."""
    mesh = single_process()
    model = build_model(small_config(), Stage((), is_first=False, is_last=False), mesh)
    sharded = sharded_by(ModelChunks([model]), OptimizerConfig(lr=1.0), mesh)
    assert (sharded.plans, sharded.owned, list(sharded.gradients)) == ([], [], [])
    sharded.gradients.zero()
    sharded.finalize_gradients(sharded.chunks, pg_collection=mesh.groups)
    sharded.gather.start()
    sharded.gather.wait()


def backward_order(rank: int, world_size: int) -> tuple[list[str], list[str], list[int]]:
    """In which order gradients arrive, that of the plans, and how many reductions of experts start before each."""
    mesh = build_mesh(ParallelConfig())
    started: list[tuple[str, int]] = []
    with mock.patch.object(Mesh, "replicas", lambda mesh, name: Watched(getattr(mesh.groups, name), started, name)):
        sharded = shard_model(mesh, ParallelConfig(), 2000)
    model = sharded.chunks[0].module
    arrived: list[str] = []
    before: list[int] = []
    for name, parameter in model.named_parameters():

        def note(_: torch.Tensor, name: str = name) -> None:
            arrived.append(name)
            before.append(sum(group.startswith("expt_dp") for group, _ in started))

        parameter.register_post_accumulate_grad_hook(note)
    sharded.gradients.zero()
    sharded.chunks[0](micro_batch(rank)).sum().backward()
    sharded.finalize_gradients(sharded.chunks, pg_collection=mesh.groups)
    planned = sorted(
        (order, own.parameter.name)
        for plan in sharded.plans
        for order, own in zip(plan.order, plan.shards, strict=True)
    )
    return arrived, [name for _, name in planned], before


def layers_start(names: list[str], layer: int) -> int:
    return next(i for i, name in enumerate(names) if name.startswith(f"layers.{layer}."))


def test_buffers_lie_in_the_order_of_a_backward_pass(pool: WorkerPool) -> None:
    """Layer by layer from the heads to the embedding, so that reductions overlap it."""
    for arrived, planned, before in pool.run(2, backward_order):
        assert sorted(arrived) == sorted(planned)
        layers = [name.split(".")[1] for name in arrived if name.startswith("layers.")]
        assert layers == [name.split(".")[1] for name in planned if name.startswith("layers.")] == sorted(layers)[::-1]
        assert arrived[-1] == planned[-1] == "embedding.weight"
        # Three reductions for each of four layers, under way before the layer below has its gradients.
        assert [before[layers_start(arrived, layer)] for layer in (4, 3, 2, 1, 0)] == [0, 3, 6, 9, 12]


def late_gradient(rank: int, world_size: int, reduction: str) -> str:
    mesh = build_mesh(ParallelConfig())
    parameters = make_parameters()
    make_buffers(parameters, WholeGroup(mesh.groups.dp_cp), reduction)
    backward(parameters, seed=1)
    try:
        backward(parameters, seed=2)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_reduce"])
def test_a_gradient_after_its_reduction_is_an_error(pool: WorkerPool, reduction: str) -> None:
    """It would be lost on some ranks and doubled on others, depending on who is faster."""
    for message in pool.run(2, late_gradient, reduction):
        assert "arrived after its bucket was reduced" in message


def test_a_reduction_waits_for_every_stream_that_has_added_to_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's gradients may come on a stream of its own; the reduction is started on another one."""
    main, side = mock.Mock(name="main"), mock.Mock(name="side")
    group = mock.Mock()
    group.size.return_value = 2
    current = [side]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    parameters = make_parameters()
    make_buffers(parameters, group)
    backward(parameters, seed=1, order=[1, 2, 3, 4])
    current[0] = main
    backward(parameters, seed=1, order=[0])
    group.reduce_scatter.assert_called_once()
    assert mock.call(side) in main.wait_stream.call_args_list
