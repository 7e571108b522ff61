"""Where in its datasets each stage of a run reads, so that none repeats what the ones before have read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from steptron.config.stages import Stage
from steptron.data.blend import Blend


@dataclass(frozen=True)
class Span:
    """What a stage reads of a dataset's endless stream.

    Attributes:
        number: of the dataset among all of the run, by which its order of documents is drawn.
        stage: number of the stage, by which its order of samples is.
        first_token: of the stream, where the stages before have stopped.
        samples: that the stage takes; they are shuffled among themselves.
    """

    number: int
    stage: int
    first_token: int
    samples: int


def spans(stages: Sequence[Stage]) -> list[tuple[Span, ...]]:
    """For each stage what it reads of each of its training datasets, in their order.

    A dataset goes on where the stages before have stopped with it, whatever their sequence lengths; named twice in a
    stage it has two streams. Rows that hold whole documents (``data.packing: best_fit``) are packed anew in each stage
    and move nothing on.
    """
    numbers: dict[tuple[str, int], int] = {}
    read: Counter[int] = Counter()
    found = []
    for stage in stages:
        data = stage.config.data
        taken = Blend([dataset.weight for dataset in data.train]).taken(stage.sequences)
        seen: Counter[str] = Counter()
        own = []
        for dataset, samples in zip(data.train, taken, strict=True):
            path = str(dataset.path)
            number = numbers.setdefault((path, seen[path]), len(numbers))
            seen[path] += 1
            own.append(Span(number, stage.number, read[number], int(samples)))
        if data.packing == "stream":
            for span in own:
                read[span.number] += span.samples * data.sequence_length
        found.append(tuple(own))
    return found
