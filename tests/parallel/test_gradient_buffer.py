"""Gradient buffers: accumulation, the order of reductions, and sums over ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steptron.config.schema import ParallelConfig
from steptron.data.batch import MicroBatch
from steptron.model.layer_spec import model_spec
from steptron.model.stages import split_stages
from steptron.parallel import buckets, gradient_buffer
from steptron.parallel.factored_group import FactoredGroup
from steptron.parallel.finalize import finalize_gradients
from steptron.parallel.gradient_buffer import DataParallel, GradientBuffer
from steptron.parallel.mesh import build_mesh
from tests.model.helpers import build_model, fill, gradients, random_batch, relative_error, single_process, small_config
from tests.worker_pool import WorkerPool

SHAPES = [(3, 4), (5,), (2, 2, 2), (7, 1), (6,)]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_coefficients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def backward(parameters: list[torch.nn.Parameter], seed: int, order: list[int] | None = None) -> None:
    """Leaves make_coefficients(seed) as gradients, one backward per parameter if an order is given."""
    coefficients = make_coefficients(seed)
    if order is None:
        sum((p * c).sum() for p, c in zip(parameters, coefficients, strict=True)).backward()
        return
    for index in order:
        (parameters[index] * coefficients[index]).sum().backward()


def test_main_grads_tile_the_buffer_and_accumulate_over_micro_batches() -> None:
    parameters = make_parameters()
    buffer = GradientBuffer(parameters, single_process().groups.dp)
    assert buffer.data.dtype is torch.float32 and buffer.data.numel() == sum(p.numel() for p in parameters)
    for parameter in parameters:
        assert parameter.main_grad.shape == parameter.shape
        assert parameter.main_grad.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
    for number, parameter in enumerate(parameters):
        parameter.main_grad.fill_(number)
    assert buffer.data.tolist() == [float(n) for n in (4, 3, 2, 1, 0) for _ in range(parameters[n].numel())]

    buffer.zero()
    for seed in (1, 2, 3):
        backward(parameters, seed)
        assert all(parameter.grad is None for parameter in parameters)
    buffer.finish()
    for index, parameter in enumerate(parameters):
        expected = sum(make_coefficients(seed)[index] for seed in (1, 2, 3))
        torch.testing.assert_close(parameter.main_grad, expected)
    buffer.zero()
    assert torch.count_nonzero(buffer.data) == 0
    backward(parameters, 4)
    torch.testing.assert_close(parameters[0].main_grad, make_coefficients(4)[0])


def test_bf16_gradients_accumulate_in_fp32() -> None:
    """256 small gradients on top of a large one: in bf16 each would be lost."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    buffer = GradientBuffer([parameter], single_process().groups.dp)
    (parameter * 256).sum().backward()
    for _ in range(256):
        (parameter * 0.5).sum().backward()
    buffer.finish()
    assert parameter.main_grad.dtype is torch.float32 and parameter.main_grad.item() == 256 + 128


def test_a_parameter_used_twice_counts_both_uses() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    GradientBuffer([parameter], single_process().groups.dp)
    (parameter * parameter + 2 * parameter).sum().backward()
    assert parameter.main_grad.item() == 8.0


def test_no_parameters() -> None:
    buffer = GradientBuffer([], single_process().groups.dp)
    buffer.zero()
    buffer.finish()
    assert buffer.data.numel() == 0


# -------------------------------------------------------------------------------- over ranks


ORDERS = {
    "same order": [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0]],
    "other order": [[4, 3, 2, 1, 0], [0, 2, 4, 1, 3]],
    "one rank misses some": [[4, 3, 2, 1, 0], [1, 3]],
    "one rank has none": [[4, 3, 2, 1, 0], []],
    "no rank has any": [[], []],
}


def reduce_in_orders(rank: int, world_size: int, orders: list[list[int]], bucket_elements: int) -> dict[str, Any]:
    issued: list[int] = []
    plain, size = dist.all_reduce, buckets.BUCKET_ELEMENTS
    buckets.BUCKET_ELEMENTS = bucket_elements

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        issued.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    gradient_buffer.dist.all_reduce = spy
    try:
        parameters = make_parameters()
        buffer = GradientBuffer(parameters, dist.group.WORLD)
        steps = []
        for step in range(2):
            buffer.zero()
            issued.clear()
            buffer.sync_enabled = False  # the first micro-batch
            backward(parameters, seed=100 * step + rank)
            early = len(issued)
            buffer.sync_enabled = True  # the last one
            backward(parameters, seed=100 * step + 10 + rank, order=orders[rank])
            started = len(issued)
            buffer.finish()
            steps.append((early, started, list(issued), [p.main_grad.clone() for p in parameters]))
        return {"steps": steps, "buckets": len(buffer._buckets)}
    finally:
        # The worker serves other tests afterwards.
        gradient_buffer.dist.all_reduce, buckets.BUCKET_ELEMENTS = plain, size


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("bucket_elements, buckets", [(1, 5), (10, 3), (1 << 24, 1)])
def test_reductions_are_the_same_on_all_ranks_and_sum_both(
    pool: WorkerPool, orders: list[list[int]], bucket_elements: int, buckets: int
) -> None:
    ranks = pool.run(2, reduce_in_orders, orders, bucket_elements, timeout=60)
    for step in range(2):
        expected = []
        for index in range(len(SHAPES)):
            total = sum(make_coefficients(100 * step + rank)[index] for rank in range(2))
            for rank in range(2):
                if index in orders[rank]:
                    total = total + make_coefficients(100 * step + 10 + rank)[index]
            expected.append(total)
        sizes = [rank["steps"][step][2] for rank in ranks]
        assert sizes[0] == sizes[1] and len(sizes[0]) == buckets and sum(sizes[0]) == 12 + 5 + 8 + 7 + 6
        for rank in ranks:
            early, _, _, main_grads = rank["steps"][step]
            assert early == 0, "nothing is reduced before the last micro-batch"
            for own, right in zip(main_grads, expected, strict=True):
                torch.testing.assert_close(own, right)
    assert ranks[0]["buckets"] == buckets


def test_reductions_start_during_the_backward(pool: WorkerPool) -> None:
    (_, started, issued, _), _ = pool.run(2, reduce_in_orders, ORDERS["same order"], 1)[0]["steps"]
    assert started == len(issued) == 5
    # A rank whose first bucket comes last starts all of them then, in the order of the buckets.
    (_, started, issued, _), _ = pool.run(2, reduce_in_orders, [[0, 1, 2, 3, 4]] * 2, 1)[0]["steps"]
    assert started == 5 and issued == [6, 7, 8, 5, 12]


def reduce_model_in_small_buckets(
    rank: int, world_size: int, expert: int, bucket_elements: int
) -> dict[str, tuple[int, torch.Tensor]]:
    size = buckets.BUCKET_ELEMENTS
    buckets.BUCKET_ELEMENTS = bucket_elements
    try:
        return reduce_model(rank, world_size, expert)
    finally:
        buckets.BUCKET_ELEMENTS = size


def reduce_model(rank: int, world_size: int, expert: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Gradients of two micro-batches per rank."""
    parallel = ParallelConfig(expert=expert)
    mesh = build_mesh(parallel)
    model = build_model(small_config(), mesh=mesh, parallel=parallel)
    fill(model, 0)
    wrapped = DataParallel(model, mesh)
    wrapped.zero_grad_buffer()
    with wrapped.no_sync():
        wrapped(micro_batch(2 * rank)).sum().backward()
    wrapped(micro_batch(2 * rank + 1)).sum().backward()
    finalize_gradients([wrapped], pg_collection=mesh.groups)
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
    ranks = pool.run(world_size, reduce_model_in_small_buckets, expert, bucket_elements)
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


def embedding_gradients(rank: int, world_size: int, mtp_depths: int) -> torch.Tensor | None:
    """Each stage has rank + 1 as the gradient of its embedding, if it has one."""
    parallel = ParallelConfig(pipeline=world_size)
    mesh = build_mesh(parallel)
    stage = split_stages(5, world_size)[mesh.pipeline_rank]
    model = build_model(small_config(), stage, mesh, parallel, mtp_depths=mtp_depths)
    wrapped = DataParallel(model, mesh)
    wrapped.zero_grad_buffer()
    if hasattr(model, "embedding"):
        model.embedding.weight.main_grad.fill_(rank + 1.0)
    finalize_gradients([wrapped], pg_collection=mesh.groups)
    return model.embedding.weight.main_grad.clone() if hasattr(model, "embedding") else None


@pytest.mark.parametrize("stages", [2, 4])
def test_both_copies_of_the_embedding_get_the_sum(pool: WorkerPool, stages: int) -> None:
    first, *between, last = pool.run(stages, embedding_gradients, 1)
    assert first.unique().tolist() == last.unique().tolist() == [1.0 + stages]
    assert all(gradient is None for gradient in between)


def test_without_mtp_there_is_one_embedding_and_no_sum(pool: WorkerPool) -> None:
    first, last = pool.run(2, embedding_gradients, 0)
    assert first.unique().tolist() == [1.0] and last is None


def test_a_single_stage_with_mtp_has_one_embedding() -> None:
    mesh = single_process()
    wrapped = DataParallel(build_model(small_config()), mesh)
    wrapped.module.embedding.weight.main_grad.fill_(3.0)
    finalize_gradients([wrapped], pg_collection=mesh.groups)
    assert wrapped.module.embedding.weight.main_grad.unique().tolist() == [3.0]


# --------------------------------------------------------------------------------- DataParallel


def test_experts_and_the_rest_lie_in_buffers_of_their_own_and_frozen_parameters_in_none() -> None:
    mesh = single_process()
    model = build_model(small_config(), mtp_depths=1, freeze_router=True)
    wrapped = DataParallel(model, mesh)
    shared, experts = wrapped.buffers
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = {True: 0, False: 0}
    for parameter in model.spec.parameters():
        if parameter.name in trained:
            sizes[parameter.is_expert] += parameter.size
    assert (shared.data.numel(), experts.data.numel()) == (sizes[False], sizes[True])
    without = {name for name, p in model.named_parameters() if not hasattr(p, "main_grad")}
    assert without == {name for name, p in model.named_parameters() if not p.requires_grad} != set()


def test_no_sync_is_undone_after_an_error() -> None:
    mesh = single_process()
    wrapped = DataParallel(build_model(small_config()), mesh)
    with pytest.raises(RuntimeError, match="inside"), wrapped.no_sync():
        assert not any(buffer.sync_enabled for buffer in wrapped.buffers)
        raise RuntimeError("inside")
    assert all(buffer.sync_enabled for buffer in wrapped.buffers)


def test_a_model_without_experts_has_no_expert_buffer() -> None:
    mesh = single_process()
    model = build_model(small_config(num_dense_layers=5, clamp={}))
    fill(model, 0)
    wrapped = DataParallel(model, mesh)
    wrapped.zero_grad_buffer()
    wrapped(random_batch(48, 1, 6, 0)).sum().backward()
    wrapped.finish_grad_sync()
    (buffer,) = wrapped.buffers
    assert torch.count_nonzero(buffer.data) > 0


def late_gradient(rank: int, world_size: int) -> str:
    mesh = build_mesh(ParallelConfig())
    parameters = make_parameters()
    GradientBuffer(parameters, mesh.groups.dp_cp)
    backward(parameters, seed=1)
    try:
        backward(parameters, seed=2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_after_its_reduction_is_an_error(pool: WorkerPool) -> None:
    """It would be lost on some ranks and doubled on others, depending on who is faster."""
    for message in pool.run(2, late_gradient):
        assert "arrived after its bucket was reduced" in message


def test_a_reduction_waits_for_every_stream_that_has_added_to_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's gradients may come on a stream of its own; the reduction is started on another one."""
    main, side = mock.Mock(name="main"), mock.Mock(name="side")
    group = mock.Mock(spec=FactoredGroup)
    group.size.return_value = 2
    current = [side]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    parameters = make_parameters()
    buffer = GradientBuffer(parameters, group)
    buffer.data = mock.Mock(is_cuda=True, device="cuda")
    backward(parameters, seed=1, order=[1, 2, 3, 4])
    current[0] = main
    backward(parameters, seed=1, order=[0])
    group.reduce.assert_called_once()
    assert mock.call(side) in main.wait_stream.call_args_list
