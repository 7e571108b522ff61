"""Tests of the model run on one thread, as their tensors are too small to share; some on each version of operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from steptron_kernels.select import PLAIN, Kernels, native


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["plain", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return PLAIN if request.param == "plain" else native("fp32")
