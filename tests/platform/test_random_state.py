"""Random generators go on where they stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from steptron.platform.random_state import random_states, seed_generators, set_random_states


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = random_states()
    yield
    set_random_states(states)


def draws() -> tuple[object, ...]:
    """From every generator, by every method that keeps a number back for the next call."""
    return (
        [random.random() for _ in range(3)],
        [random.gauss(0, 1) for _ in range(3)],
        np.random.rand(3).tolist(),
        [np.random.standard_normal() for _ in range(3)],
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


@pytest.mark.parametrize("num_before", [0, 1])
def test_generators_go_on_where_they_stopped(num_before: int) -> None:
    """Also between the two numbers that the normal generators of Python and NumPy make at a time."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    for _ in range(num_before):
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
    states = {name: state.clone() for name, state in random_states().items()}
    first = draws()
    assert draws() != first
    set_random_states(states)
    assert draws() == first


def test_states_have_the_same_shape_and_dtype_whatever_was_drawn() -> None:
    """A checkpoint stacks those of all ranks."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    fresh = {name: (state.shape, state.dtype) for name, state in random_states().items()}
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(17)
    assert {name: (state.shape, state.dtype) for name, state in random_states().items()} == fresh
    assert {"python", "numpy", "torch"} <= fresh.keys() and all(len(shape) == 1 for shape, _ in fresh.values())


def test_seeds_set_every_generator_and_differ_by_rank() -> None:
    seed_generators(7, 0)
    first = draws()
    seed_generators(7, 1)
    other = draws()
    seed_generators(7, 0)
    assert draws() == first
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))
