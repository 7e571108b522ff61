from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.end_to_end.runs import build_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty modules of the standard library, vocabulary 512."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.glob("[a-d]*.py") if path.stat().st_size > 2000)[:20]
    return build_data(tmp_path_factory.mktemp("corpus") / "data", files)
