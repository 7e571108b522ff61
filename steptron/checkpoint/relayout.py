"""The configuration of a checkpoint under another layout. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steptron.checkpoint.folder import MANIFEST, named_step
from steptron.checkpoint.manifest import CONFIG, read_config, read_manifest
from steptron.checkpoint.released.output import check_output
from steptron.config.checks import check
from steptron.config.loader import with_overrides
from steptron.config.schema import PretrainConfig
from steptron.errors import ConfigError, UserError

_SECTIONS = ("parallel", "optimizer.sharding")


def relayout(source: Path, overrides: Sequence[str], world_size: int) -> PretrainConfig:
    """The configuration of a run that goes on from a checkpoint under another layout.

    Args:
        source: the checkpoint.
        overrides: of ``parallel`` and ``optimizer.sharding``.
        world_size: processes of the new layout.

    Raises:
        UserError: the checkpoint is damaged or holds a model alone.
        ConfigError: an override is of another section, or no run could train under this layout; all problems.
    """
    if read_manifest(source).progress is None:
        raise UserError(
            f"{source} holds a model alone, in pieces that every layout reads as they are: give it to a run as "
            "train.initial_weights"
        )
    others = [text for text in overrides if not _is_layout(text)]
    if others:
        raise ConfigError(
            "reshard changes the layout of a checkpoint and nothing else",
            [f"{text}: only parallel.* and optimizer.sharding.* can be given here" for text in others],
        )
    config = with_overrides(read_config(source), overrides, f"{source / CONFIG} with overrides")
    check(_anywhere(config), world_size, "cpu" if config.train.device == "cpu" else "cuda")
    return config


def check_target(output: Path, source: Path, step: int, force: bool) -> None:
    """Checks that a checkpoint may be written.

    Args:
        output: the folder to be.
        source: the checkpoint that is read.
        step: of its state.
        force: a checkpoint that is there may be replaced.

    Raises:
        UserError: something is there that must not be replaced, or the folder is named after another step.
    """
    named = named_step(output)
    if named is not None and named != step:
        raise UserError(
            f"{output} is named after step {named}, but {source} holds step {step}: step_{step:08d} is right"
        )
    check_output(output, source, force, "a checkpoint", [MANIFEST])


def _is_layout(override: str) -> bool:
    key = override.partition("=")[0].strip()
    return any(key == section or key.startswith(f"{section}.") for section in _SECTIONS)


def _anywhere(config: PretrainConfig) -> PretrainConfig:
    """The configuration without what refers to the machine that trains, which need not be this one."""
    train = config.train
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"index_cache": None}),
            "train": train.model_copy(
                update={
                    "output": Path.cwd(),
                    "device": "cpu" if train.device == "cpu" else "auto",
                    "kernels": "auto",
                    "products": "auto",
                    "logging": train.logging.model_copy(update={"tensorboard": False, "wandb_project": None}),
                }
            ),
        }
    )
