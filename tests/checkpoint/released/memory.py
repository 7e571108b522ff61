"""Run as a script: moves a model in and out, reads it whole, and prints by how much each raised this process's peak.

Arguments: released folder of a small model (to load what is loaded once), that of the large one, scratch folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from steptron.platform import distributed
from steptron.platform.malloc import give_back_freed_memory


def peak() -> int:
    """Most bytes that were resident. Not ru_maxrss, which starts from what the parent process held."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def rise(action: Callable[[], object]) -> int:
    before = peak()
    action()
    return peak() - before


def main(small: Path, large: Path, scratch: Path) -> None:
    give_back_freed_memory()
    distributed.initialize(torch.device("cpu"), 60)
    from tests.checkpoint.released.transfers import do_export, do_import, load_folder

    do_import(0, 1, small, scratch / "small")
    do_export(0, 1, scratch / "small", scratch / "small-out")
    print(rise(lambda: do_import(0, 1, large, scratch / "large")))
    print(rise(lambda: do_export(0, 1, scratch / "large", scratch / "large-out", 50_000_000)))
    print(rise(lambda: [tensor.clone() for tensor in load_folder(large).values()]))
    distributed.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
