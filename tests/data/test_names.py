"""Short names of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.data.names import short_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/sft/math", "runs/sft/code"], ["math", "code"]),
        (["runs/math/data", "runs/code/data", "x"], ["math/data", "code/data", "x"]),
        (["a/b", "b"], ["a/b", "b"]),
        (["a/b", "a/b", "a/c"], ["b", "b (2)", "c"]),
        (["/data"], ["data"]),
        ([], []),
    ],
)
def test_names_tell_paths_apart(paths: list[str], names: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == names
