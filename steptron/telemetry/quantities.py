"""What is measured, and how often: the defaults, and what the configuration changes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Keep = Literal["folded", "micro_batches"]


@dataclass(frozen=True)
class Quantity:
    """How a metric is measured.

    Attributes:
        every_steps: it is in the steps whose number this divides; 0: never.
        keep: of what is measured in every micro-batch: each value, or count, sum, sum of squares, minimum and maximum
            over the step; None for what is not.
    """

    every_steps: int
    keep: Keep | None = None


DEFAULTS: Mapping[str, Quantity] = {
    "moe.tokens": Quantity(1, "folded"),
    "moe.intermediate_norm_rms": Quantity(1, "folded"),
    "moe.intermediate_norm_max": Quantity(1, "folded"),
    "moe.output_norm_rms": Quantity(1, "folded"),
    "moe.output_norm_max": Quantity(1, "folded"),
    "moe.probability": Quantity(1, "folded"),
    "moe.group_load": Quantity(1, "micro_batches"),
    "moe.group_share": Quantity(1, "micro_batches"),
    "moe.confidence": Quantity(1, "micro_batches"),
    "moe.alignment": Quantity(10),
    "weight.norm": Quantity(1),
    "gradient.norm": Quantity(1),
    "update.norm": Quantity(1),
    "muon.largest": Quantity(1),
    "gradient.dot_weight": Quantity(10),
    "gradient.stable_rank": Quantity(100),
    # The largest matrices, whose norms say least.
    "weight.norm.embedding": Quantity(10),
    "gradient.norm.embedding": Quantity(10),
    "update.norm.embedding": Quantity(10),
    "weight.norm.head": Quantity(10),
    "gradient.norm.head": Quantity(10),
    "update.norm.head": Quantity(10),
    "rank.compute_seconds": Quantity(1),
}
"""By metric, as ``steptron_metrics.catalogue`` names them; of matrices also by role."""


def resolve(every_steps: Mapping[str, int], keep: Mapping[str, Keep]) -> dict[str, Quantity]:
    """The quantities with what a configuration says of some of them.

    Raises:
        KeyError: a name is not among them.
        ValueError: ``keep`` is given for what is not measured in every micro-batch; the argument is the name.
    """
    quantities = dict(DEFAULTS)
    for name, steps in every_steps.items():
        base = quantities.get(name) or quantities[name.rpartition(".")[0]]
        quantities[name] = Quantity(steps, base.keep)
    for name, how in keep.items():
        if quantities[name].keep is None:
            raise ValueError(name)
        quantities[name] = Quantity(quantities[name].every_steps, how)
    return quantities


@dataclass(frozen=True)
class Due:
    """Which quantities a step measures."""

    quantities: Mapping[str, Quantity]
    step: int

    def measures(self, metric: str, role: str | None = None) -> bool:
        """Whether a metric, of matrices one of a role, is measured in this step."""
        own = None if role is None else self.quantities.get(f"{metric}.{role}")
        every = (own or self.quantities[metric]).every_steps
        return every > 0 and self.step % every == 0

    def keeps_micro_batches(self, metric: str) -> bool:
        return self.quantities[metric].keep == "micro_batches"
