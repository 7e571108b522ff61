"""What several tests of the data share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.corpora import build_small, varied_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets `a` (with masked spans) and `b`, with validation splits."""
    path = tmp_path_factory.mktemp("datasets")
    records: list[dict[str, object]] = [{"text": text} for text in varied_texts(60)]
    for record in records[::3]:
        record["masked_spans"] = [[0, 2]]
    build_small(path, "a", records, validation_fraction=0.3)
    build_small(path, "b", [{"text": text[::-1]} for text in varied_texts(40)], validation_fraction=0.3)
    return path
