"""A few collectives through Megatron-Core's own groups, each checked against the known result.

``steptron doctor`` runs this module in two local processes: ``python -m steptron.platform.self_test
FOLDER``. Each rank writes ``rank{n}.json``: the steps it has passed, with their seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEPS = ("rendezvous", "all-reduce", "uneven all-to-all", "pipeline exchange")
"""Names of the steps, in order."""

_TIMEOUT_SECONDS = 60.0


def main(folder: Path) -> None:
    """Runs the steps in order; the first wrong result or error ends the process."""
    import torch
    import torch.distributed as dist

    from steptron.platform import distributed

    place = distributed.world()
    passed: dict[str, float] = {}
    actions: tuple[Callable[[], None], ...] = (_join, _all_reduce, _uneven_all_to_all, _pipeline_exchange)
    torch.set_num_threads(1)
    for name, action in zip(STEPS, actions, strict=True):
        start = time.perf_counter()
        action()
        passed[name] = time.perf_counter() - start
        (folder / f"rank{place.rank}.json").write_text(json.dumps(passed))
    dist.barrier()
    distributed.shutdown()


def _join() -> None:
    import torch

    from steptron.platform import distributed

    distributed.initialize(torch.device("cpu"), _TIMEOUT_SECONDS)
    # After initialize, so that Megatron-Core is imported with its CPU compatibility in place.
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=distributed.world().size, create_gloo_process_groups=False
    )


def _all_reduce() -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    value = torch.tensor([float(group.rank() + 1)])
    dist.all_reduce(value, group=group)
    _expect(value.tolist(), [group.size() * (group.size() + 1) / 2])


def _uneven_all_to_all() -> None:
    """Rank r sends r + 1 rows to every rank, each with its own rank as value."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import all_to_all

    group = parallel_state.get_pipeline_model_parallel_group()
    rank, size = group.rank(), group.size()
    rows = torch.full((size * (rank + 1), 2), float(rank))
    received = all_to_all(group, rows, torch.arange(1, size + 1), torch.full((size,), rank + 1))
    _expect(received[:, 0].tolist(), [float(peer) for peer in range(size) for _ in range(peer + 1)])


def _pipeline_exchange() -> None:
    """Activations go forward while gradients come back, as in the steady state of 1F1B."""
    import torch
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    group = parallel_state.get_pipeline_model_parallel_group()
    rank, size = group.rank(), group.size()
    first, last = rank == 0, rank == size - 1
    config = ModelParallelConfig(pipeline_model_parallel_size=size, pipeline_dtype=torch.float32)
    communicator = P2PCommunicator(group, config)
    shape = (4, 1, 8)
    received = communicator.recv_forward(shape, first)
    activation = torch.zeros(shape) if received is None else received.detach() + 1
    for step in range(3):
        gradient = communicator.send_forward_recv_backward(activation, shape, last)
        if gradient is None:
            gradient = torch.full(shape, 100.0 + step)
        if step < 2:
            received = communicator.send_backward_recv_forward(gradient, shape, first)
            activation = torch.full(shape, step + 1.0) if received is None else received.detach() + 1
        else:
            communicator.send_backward(gradient, first)
        _expect(gradient.unique().tolist(), [100.0 + step])
    _expect(activation.unique().tolist(), [2.0 + rank])


def _expect(got: list[float], wanted: list[float]) -> None:
    if got != wanted:
        raise RuntimeError(f"wrong result: got {got}, expected {wanted}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
