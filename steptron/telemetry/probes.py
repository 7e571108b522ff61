"""A step's probes put together: what MoE layers do in its micro-batches, and what its update does to matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptron.model.moe_watch import MoeWatch
from steptron.telemetry import experts
from steptron.telemetry.frame import Measured
from steptron.telemetry.matrices import MatrixProbes
from steptron.telemetry.quantities import Due, Quantity
from steptron.train.step import TrainStep


class Probes:
    """Looks at the steps that it is begun for.

    Args:
        step: the model and its optimizer.
        num_groups: groups of experts whose load is balanced.
        quantities: what is measured how often.
    """

    def __init__(self, step: TrainStep, num_groups: int, quantities: Mapping[str, Quantity]) -> None:
        self._step, self._mesh = step, step.mesh
        self._num_groups = num_groups
        self._quantities = quantities
        self._matrices = MatrixProbes(
            step.spec, step.sharded.owned, step.optimizer, answers_for_cut=self._mesh.tensor_rank == 0
        )
        self._due = Due(quantities, 0)
        self._watches: list[MoeWatch] = []
        self._of_matrices: list[Measured] = []

    def begin(self, number: int) -> None:
        """Before the step with this number, 1 for the first."""
        self._due = Due(self._quantities, number)
        self._watches, self._of_matrices = [], []
        self._step.probes = self

    def end(self) -> list[Measured]:
        """After the step: what was measured."""
        self.detach()
        if not self._watches:
            return self._of_matrices
        return [*experts.measure(self._watches, self._mesh, self._due), *self._of_matrices]

    def detach(self) -> None:
        """Looks no more."""
        self._step.probes = None

    def watch(self, micro_batches: int) -> Sequence[MoeWatch | None]:
        looking = experts.watches(micro_batches, self._num_groups, self._due)
        self._watches = [watch for watch in looking if watch is not None]
        return looking

    def before_update(self, lr: float) -> None:
        self._matrices.before_update(self._due, lr)

    def after_update(self) -> None:
        self._of_matrices = self._matrices.after_update()
