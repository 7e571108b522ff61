"""Device and deterministic operations."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from steptron.errors import UserError
from steptron.platform import determinism, device


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_auto_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.select_device("auto") == device.select_device("cuda") == torch.device("cuda")
    assert device.select_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.select_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("built", "reason"), [(None, "built without CUDA"), ("13.0", "finds no usable GPU")])
def test_absent_cuda_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, built: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(UserError, match=f"device is 'cuda', but .*{reason}"):
        device.select_device("cuda")


def test_backend() -> None:
    assert device.backend(torch.device("cpu")) == "gloo"
    assert device.backend(torch.device("cuda", 1)) == "nccl"


def test_deterministic_algorithms_are_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    determinism.use_deterministic_algorithms(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    determinism.use_deterministic_algorithms(False)
    assert not torch.are_deterministic_algorithms_enabled()
