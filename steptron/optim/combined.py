"""Several optimizers as one, each for the pieces whose rule names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    @property
    def num_steps(self) -> int:
        return self.members[0].num_steps

    def set_num_steps(self, num_steps: int) -> None:
        for member in self.members:
            member.set_num_steps(num_steps)
