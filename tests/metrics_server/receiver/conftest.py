from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.metrics_server.receiver import process


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Receiver]:
    """A receiver for tests that do not mind each other's runs."""
    folder: Path = tmp_path_factory.mktemp("server")
    with process.receiver(
        process.settings(folder, max_runs=40, max_frame_bytes=1 << 20, max_message_bytes=4 << 20)
    ) as one:
        yield one
