"""What a checkpoint costs: how long training stands still, and how fast the bytes reach the disk.

One process holds the state of a model (parameters, Muon's and AdamW's state, fp32) and saves it in turn synchronously
and in the background. The stall of a background save is the time in its two calls, copying before and publishing
after, with the writing left out; a synchronous one stands still throughout. Beside them the same bytes are written
plainly to as many files (one `write` from memory per 64 MiB, then `fsync`). All go to the same disk.

    python -m benchmarks.checkpoint [--folder FOLDER] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import median, print_result, print_table
from steptron.checkpoint.folder import checkpoint_folder
from steptron.checkpoint.manifest import Progress
from steptron.checkpoint.saving import Saver
from steptron.config.loader import load
from steptron.config.schema import ParallelConfig
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.platform import distributed
from steptron.train.step import TrainStep

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "pretrain"
SIZES = {
    "nano": (CONFIGS / "nano.yaml", []),
    "tiny": (CONFIGS / "tiny-quickstart.yaml", []),
    "tiny, 96 experts": (CONFIGS / "tiny-quickstart.yaml", ["model.moe.num_experts=96"]),
    "tiny, experts 10 times as wide": (CONFIGS / "tiny-quickstart.yaml", ["model.moe.expert_hidden_size=800"]),
}
_CHUNK = 1 << 26


class Case:
    """One size: a model's state and the three ways to write it."""

    def __init__(self, name: str, folder: Path, mesh: Mesh, device: torch.device) -> None:
        file, overrides = SIZES[name]
        self.config = load(
            file, [*overrides, f"train.output={folder}", "parallel.expert=1", "balance.ep_groups=1"]
        ).config
        self.step = TrainStep(self.config, mesh, device)
        self.saver = Saver(self.config, [], mesh)
        self._saves = 0
        self.files: list[bytes] = []

    def save(self, in_background: bool) -> tuple[float, float]:
        """Seconds that the caller stands still, and seconds until the checkpoint is there."""
        self._saves += 1
        begin = time.perf_counter()
        self.saver.start(Progress(step=self._saves), self.step.chunks, self.step.optimizer)
        copied = time.perf_counter()
        while in_background and not self.saver.is_written:
            time.sleep(0.001)
        written = time.perf_counter()
        folder = self.saver.finish()
        end = time.perf_counter()
        self.files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
        shutil.rmtree(folder)
        return (copied - begin + end - written if in_background else end - begin), end - begin

    def write_plainly(self) -> float:
        """Seconds to write the last save's files once more."""
        folder = checkpoint_folder(self.config.train.output, 0)
        folder.mkdir(parents=True)
        begin = time.perf_counter()
        for number, content in enumerate(self.files):
            with (folder / str(number)).open("wb", buffering=0) as stream:
                for start in range(0, len(content), _CHUNK):
                    stream.write(memoryview(content)[start : start + _CHUNK])
                os.fsync(stream.fileno())
        seconds = time.perf_counter() - begin
        shutil.rmtree(folder)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    device, _ = distributed.start("cpu", None, 60)  # as the trainer does: it keeps freed memory
    mesh = build_mesh(ParallelConfig())
    rows, ratios = [], {}
    for name in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            case = Case(name, Path(folder), mesh, device)
            gc.collect()
            gc.freeze()  # as the trainer does
            case.save(in_background=False)
            seconds: dict[str, list[float]] = {"synchronous": [], "stall": [], "background": [], "plain": []}
            for number in range(arguments.rounds):
                # In turn first, second and third: what one leaves to the disk may slow down the next.
                for way in (number % 3, (number + 1) % 3, (number + 2) % 3):
                    if way == 0:
                        seconds["synchronous"].append(case.save(in_background=False)[0])
                    elif way == 1:
                        stall, whole = case.save(in_background=True)
                        seconds["stall"].append(stall)
                        seconds["background"].append(whole)
                    else:
                        seconds["plain"].append(case.write_plainly())
        synchronous, stall, background, plain = (median(values) for values in seconds.values())
        size = sum(map(len, case.files))
        rows.append(
            [
                name,
                f"{size / 1e6:,.0f}",
                f"{synchronous:.3f}",
                f"{stall:.3f}",
                f"{stall / synchronous:.2f}",
                f"{size / background / 1e6:,.0f}",
                f"{size / plain / 1e6:,.0f}",
                f"{plain / background:.2f}",
            ]
        )
        ratios[f"stall, background / synchronous, {name}"] = stall / synchronous
        ratios[f"bytes per second, saver / plain, {name}"] = plain / background
        del case
    columns = ["state", "MB", "sync s", "stall s", "stall / sync", "saver MB/s", "plain MB/s", "saver / plain"]
    print_table("Checkpoints: medians", columns, rows)
    targets = {key: 0.7 for key in ratios if key.startswith("bytes")}
    print_result("checkpoint", ratios, targets)
    distributed.shutdown()


if __name__ == "__main__":
    main()
