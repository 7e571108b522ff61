"""The two layouts of 4,096 ranks that the planning tests place and build."""

from __future__ import annotations

from pathlib import Path

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from tests.config.samples import write

CONFIGS = Path(__file__).parents[2] / "configs"
FLASH = CONFIGS / "pretrain" / "step3p5-flash.yaml"
WORLD_SIZE = 4096
RANKS = (0, 511, 4095)
EVEN = ("parallel.virtual_pipeline=3", "parallel.pipeline_layout=null")
"""PP8 x VPP3, as even as 45 layers divide by 24 stages."""
RELEASED_SIZE = 199_384_301_376  # 196,956,130,368 and three MTP depths of 809,390,336


def report(*overrides: str) -> PretrainConfig:
    """PP8 x VPP2, EP8, the rest data parallelism, 4K; with Muon."""
    config = load(FLASH, ["optimizer.name=muon", *overrides]).config
    check(config, WORLD_SIZE, "cuda")
    return config


def long_context(folder: Path) -> PretrainConfig:
    """PP8 x VPP3, CP8, EP8, the rest data parallelism, 128K."""
    file = write(folder, "long.yaml", f"base: [{FLASH}, {CONFIGS / 'parallel' / 'long-context.yaml'}]")
    batch = [
        "optimizer.name=muon",
        "data.sequence_length=131072",
        "stages.0.train.batch_ramp=null",
        "train.global_batch_size=1024",
    ]
    config = load(file, batch).config
    check(config, WORLD_SIZE, "cuda")
    return config
