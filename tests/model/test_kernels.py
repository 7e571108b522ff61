"""All ranks compute with the same operations, or none starts."""

from __future__ import annotations

import pytest
import torch

from steptron.config.schema import ParallelConfig, TrainConfig
from steptron.errors import UserError
from steptron.model import kernels
from steptron.model.kernels import choose_kernels, describe_kernels
from steptron_kernels import select
from steptron_kernels.select import PLAIN
from tests.model.helpers import single_process
from tests.worker_pool import WorkerPool

ONE, CPU = ParallelConfig(), torch.device("cpu")


def train(**fields: object) -> TrainConfig:
    return TrainConfig(output="unused", steps=1, global_batch_size=1, micro_batch_size=1, **fields)  # type: ignore[arg-type]


def test_one_process() -> None:
    single_process()
    assert choose_kernels(train(), ONE, CPU).name == "native"
    assert choose_kernels(train(kernels="plain"), ONE, CPU) is PLAIN
    with pytest.raises(UserError, match=r"^train.kernels: plain, train.products: bf16: bf16 products need"):
        choose_kernels(train(kernels="plain", products="bf16"), ONE, CPU)


def choose_on_unlike_machines(rank: int, world_size: int, asked: str) -> str:
    """The message that a rank gets when the last one has no library."""
    if rank == world_size - 1:
        select.extension.why_unavailable = lambda: "it was not built"  # type: ignore[assignment]
    try:
        choose_kernels(train(kernels=asked), ONE, CPU)
    except UserError as error:
        return str(error)
    finally:
        select.extension.why_unavailable = ORIGINAL  # type: ignore[assignment]
    return "no error"


ORIGINAL = select.extension.why_unavailable


def test_a_rank_without_the_library_is_named_by_all(pool: WorkerPool) -> None:
    messages = set(pool.run(2, choose_on_unlike_machines, "native"))
    assert messages == {"train.kernels: native, train.products: fp32: native kernels: it was not built (rank 1)"}


def test_machines_that_choose_differently_are_named_by_all(pool: WorkerPool) -> None:
    (message,) = set(pool.run(2, choose_on_unlike_machines, "auto"))
    assert "native with fp32 products on rank 0; plain with fp32 products on rank 1" in message


def test_description(monkeypatch: pytest.MonkeyPatch) -> None:
    single_process()
    assert describe_kernels(choose_kernels(train(), ONE, CPU), train(), ONE) == "native operations, fp32 products"
    assert describe_kernels(PLAIN, train(kernels="plain"), ONE) == "plain torch operations"
    monkeypatch.setattr(kernels.extension, "why_unavailable", lambda: "it was not built")
    assert describe_kernels(PLAIN, train(), ONE) == "plain torch operations: it was not built"


def test_tensor_parallelism_keeps_to_fp32_products_and_says_what_is_not_native() -> None:
    single_process()
    parallel = ParallelConfig(tensor=2)
    chosen = choose_kernels(train(products="auto"), parallel, CPU)
    expected = "native operations, fp32 products; linear layers and the loss are torch's, for tensor parallelism"
    assert describe_kernels(chosen, train(), parallel) == expected
