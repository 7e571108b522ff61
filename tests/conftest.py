"""Fixtures and defaults of the whole test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from steptron.platform import megatron_cpu
from tests.worker_pool import WorkerPool

TEST_TIMEOUT_SECONDS = 300
TEST_THREADS = 2

torch.set_num_threads(TEST_THREADS)
if not torch.cuda.is_available():
    megatron_cpu.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test a timeout, unless it or the command line sets one."""
    if config.getoption("timeout", None) is None:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for multi-process tests: ``pool.run(world_size, function, *args)``."""
    workers = WorkerPool()
    yield workers
    workers.close()
