"""The schedule of a run: what each of its stages sets, and what changes within them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steptron.config.batch_schedule import BatchSchedule
from steptron.config.schema import DataConfig, DatasetConfig, RopeConfig
from steptron.config.stages import Curriculum, Stage
from steptron.optim.schedule import bias_update_rate, learning_rate, warmup_steps

HEADINGS = (
    *("stage", "tokens", "steps", "length", "batch", "learning rate", "decay", "rope (full)", "mixture"),
    *("metadata", "bias rate", "EP loss", "MTP", "trains"),
)


def rows(curriculum: Curriculum) -> list[tuple[str, ...]]:
    """A row of cells for each stage, under :data:`HEADINGS`."""
    return [_row(stage) for stage in curriculum.stages]


def table(curriculum: Curriculum) -> list[str]:
    """The same as lines of text, columns aligned, with what the run takes in all."""
    cells = [HEADINGS, *rows(curriculum)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    last = curriculum.stages[-1]
    total = last.first_token + last.consumed_tokens
    return [*lines, f"in all {total:,} tokens (padding counted) in {curriculum.steps:,} steps"]


def _row(stage: Stage) -> tuple[str, ...]:
    config = stage.config
    steps, balance, loss = config.train.steps, config.balance, config.loss
    rates = [bias_update_rate(balance.bias, step, steps) for step in (0, steps - 1)]
    bias = "frozen" if balance.freeze_router else _span(*rates)
    return (
        stage.name or "(whole run)",
        f"{stage.consumed_tokens:,}",
        f"{steps:,}",
        f"{config.data.sequence_length:,}",
        _batch(stage),
        _learning_rate(stage),
        f"{config.optimizer.weight_decay:g}",
        _rope(config.model.full.rope),
        _mixture(config.data.train),
        _metadata(config.data),
        bias,
        f"{balance.ep_loss_coefficient:g}",
        f"{loss.mtp_weight:g} x {loss.mtp_train_depths}" if loss.mtp_train_depths else "none",
        "MTP" if config.train.freeze_backbone else "all but router" if balance.freeze_router else "all",
    )


def _metadata(data: DataConfig) -> str:
    until = data.metadata_in_loss_tokens
    return data.metadata.replace("_", " ") + ("" if until is None else f" for {until:,}")


def _span(first: float, last: float) -> str:
    return f"{first:g}" if first == last else f"{first:g} to {last:.3g}"


def _batch(stage: Stage) -> str:
    sizes = BatchSchedule(stage.config.train).sizes
    return f"{sizes[-1]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"


def _learning_rate(stage: Stage) -> str:
    optimizer, steps = stage.config.optimizer, stage.config.train.steps
    warmup = warmup_steps(optimizer.schedule, steps)
    begin = f"0 to {optimizer.lr:g} in {warmup:,}, " if warmup else ""
    kind = optimizer.schedule.kind
    if kind == "constant":
        return f"{begin}{optimizer.lr:g}"
    end = learning_rate(optimizer, steps, steps)
    return f"{begin}{optimizer.lr:g} to {end:g} ({kind})"


def _rope(rope: RopeConfig) -> str:
    return f"{rope.theta:g}" + ("" if rope.scaling is None else f" / {rope.scaling.factor:g}")


def _mixture(datasets: Sequence[DatasetConfig]) -> str:
    total = sum(dataset.weight for dataset in datasets)
    if len(datasets) == 1:
        return str(datasets[0].path)
    return ", ".join(f"{dataset.path} {dataset.weight / total:.3g}" for dataset in datasets)


def plot(curriculum: Curriculum, png: Path) -> None:
    """Draws learning rate, batch, mixture and context of a run against its tokens, padding counted.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    rate, batch, context, mixture = figure.subplots(4, sharex=True)
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]  # Okabe-Ito
    names = list(dict.fromkeys(str(d.path) for stage in curriculum.stages for d in stage.config.data.train))
    for stage in curriculum.stages:
        config, steps = stage.config, stage.config.train.steps
        chosen = sorted({*_marks(stage), *(steps * part // 400 for part in range(400))})
        tokens = [_tokens_before(stage, step) for step in chosen]
        ends = [tokens[0], stage.first_token + stage.consumed_tokens]
        rate.plot(
            [*tokens, ends[1]],
            [learning_rate(config.optimizer, step, steps) for step in (*chosen, steps)],
            color=colours[0],
        )
        sizes = [_batch_at(stage, step) for step in chosen]
        batch.step([*tokens, ends[1]], [*sizes, sizes[-1]], where="post", color=colours[0])
        context.plot(ends, [config.data.sequence_length] * 2, color=colours[0])
        total, below = sum(dataset.weight for dataset in config.data.train), 0.0
        for name in names:
            share = sum(d.weight for d in config.data.train if str(d.path) == name) / total
            mixture.fill_between(
                ends, below, below + share, color=colours[names.index(name) % len(colours)], linewidth=0
            )
            below += share
        for axes in (rate, batch, context, mixture):
            axes.axvline(ends[1], color="#BBBBBB", linewidth=0.8, zorder=0)
        rate.annotate(stage.name, (sum(ends) / 2, 1.02), xycoords=rate.get_xaxis_transform(), ha="center", fontsize=8)
    for number, name in enumerate(names):
        mixture.fill_between([], 0, 0, color=colours[number % len(colours)], label=name)
    mixture.legend(loc="lower left", fontsize=8)
    context.set_yscale("log", base=2)
    labels = ("learning rate", "batch (sequences)", "context (tokens)", "mixture")
    for axes, label in zip((rate, batch, context, mixture), labels, strict=True):
        axes.set_ylabel(label)
    rate.set_ylim(bottom=0)
    batch.set_ylim(bottom=0)
    mixture.set_xlabel("tokens, padding counted")
    figure.savefig(png, dpi=120)


def _marks(stage: Stage) -> list[int]:
    """Steps at which a schedule bends."""
    steps = stage.config.train.steps
    return sorted({0, min(warmup_steps(stage.config.optimizer.schedule, steps), steps - 1), steps - 1})


def _tokens_before(stage: Stage, step: int) -> int:
    sequences = stage.consumed_before(stage.first_step + step) - stage.first_sequence
    return stage.first_token + sequences * stage.config.data.sequence_length


def _batch_at(stage: Stage, step: int) -> int:
    batches = BatchSchedule(stage.config.train)
    return batches.global_batch_size(batches.consumed_after(step))
