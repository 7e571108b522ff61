"""What stages read of their datasets: nothing twice, nothing left out, whatever their sequence lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptron.config.loader import load
from steptron.config.stages import Curriculum
from steptron.data.dataset import SampleOrder
from steptron.data.sampler import SampleSource
from steptron.data.spans import spans
from tests.config.samples import MINIMAL, write
from tests.data.corpora import build_small


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that no two stretches of three tokens are alike in: every position can be told from its tokens."""
    texts = [{"text": " ".join(f"{number}:{word}" for word in range(60))} for number in range(80)]
    return build_small(tmp_path_factory.mktemp("data"), "numbered", texts)


def curriculum(folder: Path, data: Path, lengths: list[int], other: Path | None = None) -> Curriculum:
    mixture = [f"{{path: {data}, weight: 3}}", *([f"{{path: {other}}}"] if other else [])]
    lines = [
        f"  - {{name: s{number}, tokens: 3000, data: {{sequence_length: {length}, "
        f"train: [{', '.join(mixture if number % 2 else reversed(mixture))}]}}}}"
        for number, length in enumerate(lengths)
    ]
    text = MINIMAL.replace("  steps: 10\n", "") + "stages:\n" + "\n".join(lines)
    return load(write(folder, "run.yaml", text)).curriculum


def test_stages_go_on_where_those_before_have_stopped(tmp_path: Path, data: Path) -> None:
    run = curriculum(tmp_path, data, [16, 64, 32])
    read: list[np.ndarray] = []
    for stage, own in zip(run.stages, spans(run.stages), strict=True):
        source = SampleSource(stage.config.data.train, "train", stage.config.data, spans=own)
        rows = source.micro_batch(0, stage.sequences).tokens_BS.numpy()
        read += list(rows)
        assert not np.array_equal(rows[0], source.micro_batch(1, 1).tokens_BS.numpy()[0])
    whole = SampleSource(run.stages[0].config.data.train, "train", run.stages[0].config.data)
    total = sum(row.size for row in read)
    segments = whole._streams[0].segments(0, total)
    stream, _ = whole.datasets[0].gather(segments)
    assert total < whole.datasets[0].num_tokens, "else repeating would be right"
    # Rows are stretches of the stream; put in its order they are the stream.
    text = stream.astype(np.int32).tobytes()
    places = sorted((text.index(row.astype(np.int32).tobytes()) // 4, row.size) for row in read)
    ends = np.cumsum([size for _, size in places])
    assert [place for place, _ in places] == [0, *ends[:-1]]


def test_a_dataset_keeps_its_order_wherever_it_stands_in_the_blend(tmp_path: Path, data: Path) -> None:
    other = build_small(tmp_path, "other", [{"text": f"other {number} text"} for number in range(400)])
    found = spans(curriculum(tmp_path, data, [16, 16, 16], other).stages)
    assert [[span.number for span in own] for own in found] == [[0, 1], [1, 0], [0, 1]]
    by_number = {number: [span for own in found for span in own if span.number == number] for number in (0, 1)}
    for own in by_number.values():
        assert [span.first_token for span in own] == [sum(s.samples for s in own[:n]) * 16 for n in range(3)]
        assert [span.stage for span in own] == [0, 1, 2]


@pytest.mark.parametrize(("block", "samples"), [(10, 25), (10, 20), (10, 3), (7, 7), (1, 4)])
def test_the_last_block_ends_with_the_samples_that_are_taken(block: int, samples: int) -> None:
    order = SampleOrder(block, 3, samples=samples)
    places = [order.place(number) for number in range(samples)]
    assert sorted(places) == list(range(samples))
    free = SampleOrder(block, 3)
    full = samples // block * block
    assert places[:full] == [free.place(number) for number in range(full)]
    # What a run leaves out makes it go on beyond: in the stream's order.
    assert [order.place(samples + number) for number in range(5)] == [samples + number for number in range(5)]


def test_best_fit_packing_moves_nothing_on(tmp_path: Path, data: Path) -> None:
    text = MINIMAL.replace("  steps: 10\n", "").replace(
        "sequence_length: 32", "sequence_length: 32\n  packing: best_fit"
    )
    stages = "stages: [{name: a, tokens: 500}, {name: b, tokens: 500}]"
    found = spans(load(write(tmp_path, "run.yaml", text + stages)).curriculum.stages)
    assert [[span.first_token for span in own] for own in found] == [[0, 0], [0, 0]]
