"""Checkpoints of a few small files, with a manifest as training writes it; nothing in them can be loaded."""

from __future__ import annotations

import random
from pathlib import Path

from steptron.checkpoint.checksums import file_sums
from steptron.checkpoint.folder import checkpoint_folder
from steptron.checkpoint.manifest import CONFIG, Manifest, Progress, write_manifest
from steptron.config.loader import load
from steptron.config.show import to_yaml
from tests.parallel.layouts import NANO

SIZES = {"__0_0.distcp": 3000, "__0_1.distcp": 2000, "__1_0.distcp": 2500, ".metadata": 700}
PARALLEL = {"pipeline": 2, "virtual_pipeline": 1, "tensor": 1, "context": 1, "expert": 2}


def make(output: Path, step: int, loss: float | None = None, overrides: tuple[str, ...] = ()) -> Path:
    """A checkpoint of four processes in a run's folder."""
    folder = checkpoint_folder(output, step)
    folder.mkdir(parents=True)
    numbers = random.Random(step)
    for name, size in SIZES.items():
        (folder / name).write_bytes(numbers.randbytes(size))
    (folder / CONFIG).write_text(to_yaml(load(NANO, [f"train.output={output}", *overrides]).config))
    manifest = Manifest(
        written_at=f"2026-01-02T03:04:{step % 60:02d}+00:00",
        steptron_version="1",
        torch_version="2",
        megatron_version="3",
        processes=4,
        layout=PARALLEL,
        progress=Progress(step, 8 * step, 500 * step, recent_losses=(6.25, 1e-07, 3.141592653589793)),
        optimizer_steps=step,
        validation_loss=loss,
        datasets=["hash"],
        files=file_sums(folder, [*SIZES, CONFIG]),
    )
    write_manifest(folder, manifest)
    return folder


def flip(file: Path, place: int, bit: int = 3) -> None:
    """Flips one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)
