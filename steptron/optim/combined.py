"""Several optimizers as one, each for the pieces whose rule names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steptron.optim.base import Optimizer, StateTensor


class Combined:
    """Steps its members one after the other."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)

    def step(self, lr: float) -> None:
        for member in self.members:
            member.step(lr)

    def state(self) -> Mapping[str, Sequence[StateTensor]]:
        states: dict[str, list[StateTensor]] = {}
        for member in self.members:
            for kind, tensors in member.state().items():
                states.setdefault(kind, []).extend(tensors)
        return states

    def num_non_finite(self) -> torch.Tensor:
        counts = [member.num_non_finite() for member in self.members]
        return torch.stack([count.to(counts[0].device) for count in counts]).sum()

    def non_finite(self) -> list[str]:
        return [name for member in self.members for name in member.non_finite()]

    @property
    def num_steps(self) -> int:
        return self.members[0].num_steps

    def set_num_steps(self, num_steps: int) -> None:
        for member in self.members:
            member.set_num_steps(num_steps)
