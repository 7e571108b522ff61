"""Global batch size over training."""

from __future__ import annotations

from steptron.config.schema import TrainConfig


class BatchSchedule:
    """Global batch size as a function of the sequences consumed so far.

    Without a ramp the size is constant. With one, it rises from ``start`` by ``increment`` up to
    ``global_batch_size``, each size for an equal share of the ramp's ``sequences``; after them the
    full size holds. This is Megatron-Core 0.16.1's ``RampupBatchsizeNumMicroBatchesCalculator``,
    in integers (its float division can miss a border by one increment) and without state: any
    consumed value may be asked for, in any order. (0.19.2 has no such class; its
    ``StepBatchsizeNumMicroBatchesCalculator`` gives the same sizes for the same thresholds.)

    Raises:
        ValueError: the ramp starts above the final size, or its increments do not lead to it.
    """

    def __init__(self, config: TrainConfig) -> None:
        final, ramp = config.global_batch_size, config.batch_ramp
        self._sizes: tuple[int, ...] = (final,)
        self._ramp_sequences = 0
        if ramp is None:
            return
        if ramp.start > final:
            raise ValueError(f"train.batch_ramp.start ({ramp.start}) must not exceed train.global_batch_size ({final})")
        if (final - ramp.start) % ramp.increment:
            raise ValueError(
                f"train.batch_ramp.increment ({ramp.increment}) must divide the way from train.batch_ramp.start "
                f"({ramp.start}) to train.global_batch_size ({final}), which is {final - ramp.start}"
            )
        self._sizes = tuple(range(ramp.start, final + 1, ramp.increment))
        self._ramp_sequences = ramp.sequences

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run, ascending; each must suit the layout."""
        return self._sizes

    def global_batch_size(self, consumed_sequences: int) -> int:
        """Sequences of the next optimizer step, over all ranks.

        Raises:
            ValueError: the count is negative.
        """
        if consumed_sequences < 0:
            raise ValueError(f"consumed_sequences must be 0 or more, not {consumed_sequences}")
        increments = len(self._sizes) - 1
        if consumed_sequences >= self._ramp_sequences:
            return self._sizes[increments]
        return self._sizes[consumed_sequences * increments // self._ramp_sequences]

    def consumed_after(self, steps: int) -> int:
        """Sequences consumed by the first ``steps`` optimizer steps."""
        consumed = 0
        increments = len(self._sizes) - 1
        for number, size in enumerate(self._sizes[:-1], start=1):
            border = -(-number * self._ramp_sequences // increments)
            taken = min(steps, max(0, -(-(border - consumed) // size)))
            consumed += taken * size
            steps -= taken
        return consumed + steps * self._sizes[-1]

    def steps_to_consume(self, sequences: int) -> int:
        """The fewest optimizer steps that consume at least so many sequences."""
        consumed = steps = 0
        increments = len(self._sizes) - 1
        for number, size in enumerate(self._sizes[:-1], start=1):
            border = min(sequences, -(-number * self._ramp_sequences // increments))
            taken = max(0, -(-(border - consumed) // size))
            consumed += taken * size
            steps += taken
        return steps + max(0, -(-(sequences - consumed) // self._sizes[-1]))
