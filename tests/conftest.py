"""Fixtures and defaults of the whole test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from steptron.platform import megatron_cpu
from tests.worker_pool import WorkerPool

TEST_THREADS = 1

torch.set_num_threads(TEST_THREADS)
if not torch.cuda.is_available():
    megatron_cpu.install()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for multi-process tests: ``pool.run(world_size, function, *args)``."""
    workers = WorkerPool()
    yield workers
    workers.close()
