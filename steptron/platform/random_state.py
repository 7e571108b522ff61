"""The state of every random generator of this process, as tensors that a checkpoint can hold."""

from __future__ import annotations

import random
import struct

import numpy as np
import torch


def seed_generators(seed: int, rank: int) -> None:
    """Starts all generators of this process anew, in every process from another state."""
    python, numpy, torch_seed = np.random.SeedSequence([seed, rank]).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(torch_seed)  # the GPU's too


def random_states() -> dict[str, torch.Tensor]:
    """One-dimensional tensors by generator: Python's, NumPy's, torch's, and the current GPU's where there is one.

    Each has the same length in every process.
    """
    _, words, normal = random.getstate()
    numpy = np.random.get_state(legacy=False)
    states = {
        "python": [*words, normal is not None, _bits(normal or 0.0)],
        "numpy": [*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"], _bits(numpy["gauss"])],
    }
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in states.items()}
    tensors["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Goes on from what :func:`random_states` gave in a process on the same kind of device."""
    *words, has_normal, normal = states["python"].tolist()
    random.setstate((random.getstate()[0], tuple(words), _number(normal) if has_normal else None))
    *keys, position, has_normal, normal = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_normal, _number(normal)))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
