"""Weight clipping over all ranks of a run."""

from __future__ import annotations

import math

from steptron.errors import UserError, some_of
from steptron.model.chunks import ModelChunks
from steptron.model.output_norms import OutputNorms
from steptron.optim.base import Optimizer
from steptron.optim.weight_clipping import Clipped, clip_weights
from steptron.parallel.mesh import Mesh
from steptron.parallel.sharded_model import ShardedModel
from steptron.platform.distributed import gather_to_all


class WeightClipping:
    """Watches the outputs of experts' projections, and scales weights back when told to.

    Args:
        threshold: largest norm of an output that is left alone.
        chunks: the model.
        sharded: what this rank owns of it.
        optimizer: keeps the fp32 weights.
        mesh: the process groups.
    """

    def __init__(
        self, threshold: float, chunks: ModelChunks, sharded: ShardedModel, optimizer: Optimizer, mesh: Mesh
    ) -> None:
        self._threshold = threshold
        self._norms = OutputNorms(chunks)
        self._sharded = sharded
        self._optimizer = optimizer
        self._mesh = mesh

    def restart(self) -> None:
        """Forgets the outputs so far."""
        self._norms.restart()

    def begin_step(self) -> None:
        """Marks where a step begins."""
        self._norms.keep()

    def drop_step(self) -> None:
        """Forgets the outputs of a step that is not made."""
        self._norms.drop()

    def apply(self) -> list[Clipped]:
        """Clips by the outputs since the last call. Every rank must call it.

        All ranks that hold a projection then have the same bits of it.

        Returns:
            What was clipped, on all ranks together.

        Raises:
            UserError: on every rank: an output was not finite (message names the projections).
        """
        self._norms.combine(self._mesh.groups.expt_dp)
        self._sharded.gather.wait()
        own = clip_weights(self._optimizer, self._sharded.owned, self._norms.maxima, self._threshold)
        self._norms.restart()
        clipped = [item for items in gather_to_all(own) for item in items]
        if bad := [item.name for item in clipped if not math.isfinite(item.largest)]:
            raise UserError(
                f"weight clipping: outputs of {some_of(bad)} have been NaN or infinite: no checkpoint was written, "
                "the last one is as it was. Lower optimizer.lr and run again"
            )
        if clipped:
            self._sharded.gather.start()
            self._sharded.gather.wait()
        return clipped

    def describe(self, clipped: list[Clipped]) -> str:
        """One line."""
        worst = max(clipped, key=lambda item: item.largest)
        return (
            f"weight clipping: {len(clipped)} expert projection{'s' if len(clipped) > 1 else ''} scaled back to an "
            f"output norm of {self._threshold:g}; the largest was {worst.largest:.4g}, of {worst.name}"
        )
