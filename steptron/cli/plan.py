"""`steptron plan`: what a layout costs, and what each of its ranks holds, before anything runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steptron.config.checks import smallest_world_size
from steptron.config.loader import load
from steptron.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from steptron.config.schema import PretrainConfig
    from steptron.model.layer_spec import ModelSpec
    from steptron.model.stages import Stage
    from steptron.parallel.traffic import CommunicationVolume
    from steptron.planning.memory import Assumptions, RankMemory
    from steptron.planning.ownership import BufferFigures
    from steptron.planning.placement import Placement
    from steptron.planning.plan import LayoutPlan, OwnedParameter, RankPlan

_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.")
_GROUP_NAMES = {
    "pp": "pipeline",
    "tp": "tensor",
    "cp": "context",
    "dp": "data",
    "dp_cp": "data x context",
    "tp_dp_cp": "data x context x tensor",
    "ep": "expert",
    "expt_dp": "expert-data",
}


def plan(
    file: Annotated[Path, typer.Argument(help="YAML file.", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that win over the file's.", metavar="[a.b=c]...")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; the fewest that the layout takes when not given.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Stage of a run with stages; the first when not given.")] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Build this rank on this machine and show what it holds.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0, help="Memory of a device in GiB: fail if a rank needs more.")
    ] = None,
    imbalance: Annotated[
        float, typer.Option(min=1, help="Rows at the busiest rank's experts over those at perfect balance.")
    ] = 1.0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Device to plan for; auto is train.device, and there auto is CUDA in bf16, the CPU in fp32."),
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file, for machines.")
    ] = None,
) -> None:
    """Show stages, memory, communication and idle time of a layout, or everything that one rank holds.

    Nothing runs: no GPU, data or other process is needed, for any number of processes.
    """
    from rich.console import Console

    from steptron.planning.memory import assume
    from steptron.planning.plan import check_elsewhere, plan_layout, plan_rank

    config = load(file, overrides or ()).stage(stage).config
    processes = world_size if world_size is not None else smallest_world_size(config.parallel)
    assumed = assume(config, None if device == "auto" else device, imbalance)
    check_elsewhere(config, processes, assumed)
    console = Console(highlight=False)
    if not console.is_terminal:
        # In a pipe or file a table is not folded to a width that nobody sees.
        console = Console(highlight=False, width=200)
    if rank is None:
        layout = plan_layout(config, processes, assumed)
        _print_layout(console, config, layout)
        content, peak, where = (
            layout.to_json(),
            layout.fullest.memory.peak,
            f"pipeline rank {layout.fullest.pipeline_rank}",
        )
    else:
        if rank >= processes:
            count = f"{processes:,} process{'' if processes == 1 else 'es'}"
            raise UserError(
                f"--rank {rank}: the layout has {count} here, numbered 0 to {processes - 1} "
                "(--world-size sets another number)"
            )
        one = plan_rank(config, processes, rank, assumed)
        _print_rank(console, config, one, assumed)
        content, peak, where = one.to_json(), one.memory.peak, f"rank {rank}"
    if json_file is not None:
        _write(json_file, content)
    if memory is not None:
        fits = peak <= memory * 2**30
        console.print(f"\n{where} needs {_gib(peak)} GiB of {memory:g}: {'fits' if fits else 'does not fit'}")
        if not fits:
            raise typer.Exit(1)


def _write(file: Path, content: object) -> None:
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {file}: cannot be written: {error.strerror}") from error


# ---------------------------------------------------------------------------------------- layout


def _print_layout(console: Console, config: PretrainConfig, layout: LayoutPlan) -> None:
    _print_sizes(console, config, layout.placement, layout.micro_batches)
    _print_stages(console, layout)
    _print_layout_buffers(console, config, layout)
    _print_memories(console, layout)
    _print_volumes(console, layout)
    idle = [rank.idle_share for rank in layout.ranks]
    console.print(
        f"\nPipeline: the busiest rank computes {layout.imbalance:.3f} times the mean. If only computing took time, "
        f"ranks would wait {min(idle):.1%} to {max(idle):.1%} of a step; with "
        f"equal stages {layout.ideal_idle_share:.1%}."
    )
    _print_assumptions(console, layout.assumed)


def _print_sizes(console: Console, config: PretrainConfig, place: Placement, micro_batches: int) -> None:
    chunks = len(place.stages) // place.pipeline
    train, length = config.train, config.data.sequence_length
    console.print(
        f"{place.world_size:,} rank{'' if place.world_size == 1 else 's'}: pipeline {place.pipeline}"
        f"{f' x {chunks} chunks' if chunks > 1 else ''}; attention and dense layers tensor {place.tensor} x "
        f"context {place.context} x data {place.data:,}; experts expert {place.expert} x expert-data "
        f"{place.expert_data:,}"
    )
    ramp = f" (from {train.batch_ramp.start:,}, when ranks wait longer)" if train.batch_ramp is not None else ""
    console.print(
        f"step: {train.global_batch_size:,} sequences{ramp} of {length:,} tokens, {micro_batches} micro-batches of "
        f"{train.micro_batch_size} per rank; {train.precision}, {config.optimizer.name}"
    )


def _print_stages(console: Console, layout: LayoutPlan) -> None:
    table = _table("\nStages, in the order in which a micro-batch passes through them")
    table.add_column("stage", justify="right")
    table.add_column("pipeline rank, chunk")
    table.add_column("holds")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs", justify="right")
    for stage in layout.stages:
        table.add_row(
            str(stage.index),
            f"{stage.pipeline_rank}, {stage.chunk}",
            _contents(layout.placement.spec, stage.stage, layout.placement.mtp_depths),
            f"{stage.parameters:,}",
            f"{stage.flops_share:.1%}",
        )
    console.print(table)


def _print_layout_buffers(console: Console, config: PretrainConfig, layout: LayoutPlan) -> None:
    """Buffers of pipeline ranks that have equal ones share their lines."""
    from steptron.planning.layer_table import index_ranges

    alike: dict[BufferFigures, list[int]] = {}
    for rank in layout.ranks:
        for buffer in rank.buffers:
            alike.setdefault(buffer, []).append(rank.pipeline_rank)
    table = _table(
        "\nGradient buffers of a rank, by pipeline rank, and the ranks that own their parameters between them"
    )
    table.add_column("pipeline rank")
    _add_buffer_columns(table)
    for buffer, ranks in alike.items():
        table.add_row(index_ranges(ranks), *_buffer_cells(buffer, config))
    console.print(table)


_BUFFER_HEADINGS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("holds", "left"),
    ("ranks", "right"),
    ("parameters", "right"),
    ("gradients are", "left"),
    ("parts", "right"),
    ("padding", "right"),
    ("refused padding, GiB", "right"),
    ("busiest owner", "right"),
)


def _add_buffer_columns(table: Table) -> None:
    for heading, justify in _BUFFER_HEADINGS:
        table.add_column(heading, justify=justify)


def _buffer_cells(buffer: BufferFigures, config: PretrainConfig) -> list[str]:
    """By ``_BUFFER_HEADINGS``: padding as elements and share, and the padding that reduce-scattering would have had
    with its bytes of gradients (fp32) and parameters."""
    reduced = buffer.ranks > 1
    scatters = buffer.reduction.value == "reduce_scatter"
    element = 2 if config.train.precision == "bf16" else 4
    refused = ""
    if reduced and not scatters and buffer.scattered_padding > buffer.padding:
        refused = _padding(buffer.scattered_padding, buffer) + f", {_gib((4 + element) * buffer.scattered_padding)}"
    return [
        buffer.title,
        f"{buffer.ranks:,}",
        f"{buffer.parameters:,}",
        ("reduce-scattered" if scatters else "all-reduced") if reduced else "complete",
        str(buffer.spans),
        _padding(buffer.padding, buffer),
        refused,
        "" if buffer.imbalance is None else f"{buffer.imbalance:.2f} x mean",
    ]


def _padding(elements: int, buffer: BufferFigures) -> str:
    return f"{elements:,} ({elements / buffer.parameters:.1%})" if elements else "0"


def _print_memories(console: Console, layout: LayoutPlan) -> None:
    table = _table("Memory per rank, GiB (the rank of each pipeline rank that needs most)")
    headings = (
        *("parameters", "gradients", "optimizer", "other fixed"),
        *("activations", "in flight", "transient", "update", "peak"),
    )
    for heading in ("pipeline rank", "parameters held", "FLOPs", "idle", *headings):
        table.add_column(heading, justify="right")
    for rank in layout.ranks:
        memory = rank.memory
        sizes = (
            _gib(memory.parameters),
            _gib(memory.gradients),
            _gib(memory.optimizer),
            _gib(memory.packed_weights + memory.batch + memory.buffers),
            _gib(sum(memory.activations.values())),
            str(memory.in_flight),
            _gib(memory.transient),
            _gib(memory.update),
            _gib(memory.peak),
        )
        cells = (str(rank.pipeline_rank), f"{rank.parameters:,}", f"{rank.flops_share:.1%}", f"{rank.idle_share:.1%}")
        table.add_row(*cells, *sizes)
    console.print(table)
    fullest = layout.fullest
    console.print(f"fullest: pipeline rank {fullest.pipeline_rank}, {_gib(fullest.memory.peak)} GiB")


def _print_volumes(console: Console, layout: LayoutPlan) -> None:
    keys = dict.fromkeys(key for rank in layout.ranks for key in rank.communication.traffic)
    if not keys:
        return
    table = _table("\nCommunication of a step, GiB that this rank of each pipeline rank hands to collectives")
    table.add_column("group")
    table.add_column("kind")
    for rank in layout.ranks:
        table.add_column(str(rank.pipeline_rank), justify="right")
    for key in keys:
        sizes = [rank.communication.traffic.get(key) for rank in layout.ranks]
        if all(traffic is None or traffic.payload < 2**20 for traffic in sizes) and layout.placement.world_size > 64:
            continue  # counts and norms
        table.add_row(key[0], str(key[1]), *("-" if traffic is None else _gib(traffic.payload) for traffic in sizes))
    console.print(table)


# ------------------------------------------------------------------------------------------ rank


def _print_rank(console: Console, config: PretrainConfig, one: RankPlan, assumed: Assumptions) -> None:
    place, built = one.placement, one.built
    micro_batches = config.train.micro_batches(place.data)
    _print_sizes(console, config, place, micro_batches)
    own = built.coordinates
    console.print(
        f"\nRank {built.rank}: pipeline {own.pipeline}; tensor {own.tensor}, context {own.context}, data {own.data}; "
        f"expert {own.expert}, expert-data {own.expert_data}"
    )
    table = _table("\nGroups")
    for heading in ("group", "ranks"):
        table.add_column(heading)
    for name, ranks in built.groups.items():
        table.add_row(_GROUP_NAMES[name], _ranks(ranks))
    console.print(table)
    for number, chunk in enumerate(built.chunks):
        held = _contents(place.spec, chunk.stage, place.mtp_depths)
        copy = " (the embedding is a copy for MTP)" if chunk.embedding_is_copy else ""
        console.print(f"chunk {number}, stage {chunk.index}: {held}{copy}")
    _print_parameters(console, one.parameters)
    _print_buffers(console, config, one)
    _print_memory(console, one.memory)
    _print_volume(console, one.communication)
    filled = ", ".join(f"{name} {_exact(amount)}" for name, amount in one.padding.items())
    console.print(f"\nSequences are shared in units of {one.sequence_unit} tokens. Padding: {filled}.")
    _print_assumptions(console, assumed)


def _print_parameters(console: Console, parameters: Sequence[OwnedParameter]) -> None:
    from steptron.planning.layer_table import index_ranges

    table = _table("\nParameters, as built")
    for heading in ("chunk", "name", "here", "whole", "size here", "held by"):
        table.add_column(heading, justify="right" if heading == "size here" else "left")
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    sizes: dict[tuple[str, str, str, str, str], int] = {}
    for owned in parameters:
        shard, name = owned.held.shard, owned.held.name
        notes = (" (copy)" if owned.held.is_copy else "") + ("" if owned.trained else " (no gradient)")
        row = (
            str(owned.held.chunk),
            _LAYER.sub(r"\1.#.", name) + notes,
            _shape(owned.shape),
            _shape(shard.parameter.shape),
            _ranks(owned.owners),
        )
        layer = _LAYER.match(name)
        rows.setdefault(row, []).extend([int(layer[2])] if layer else [])
        sizes[row] = shard.size
    for (chunk, name, here, whole, owners), layers in rows.items():
        shown = name.replace("#", index_ranges(layers)) if layers else name
        each = " each" if len(layers) > 1 else ""
        size = sizes[chunk, name, here, whole, owners]
        table.add_row(chunk, shown, here, "" if here == whole else whole, f"{size:,}{each}", owners)
    console.print(table)
    console.print(f"together {sum(owned.held.shard.size for owned in parameters):,}")


def _print_buffers(console: Console, config: PretrainConfig, one: RankPlan) -> None:
    table = _table("\nGradient buffers, fp32, and the ranks that own their parameters between them")
    _add_buffer_columns(table)
    table.add_column("owned here", justify="right")
    is_factored = any(buffer.within_node for buffer in one.built.buffers)
    factors = ("within its node over", "between nodes over") if is_factored else ()
    for heading in ("added up over", *factors):
        table.add_column(heading)
    for figures, buffer in zip(one.buffers, one.built.buffers, strict=True):
        table.add_row(
            *_buffer_cells(figures, config),
            f"{buffer.owned:,}",
            _ranks(buffer.ranks),
            *([_ranks(buffer.within_node), _ranks(buffer.between_nodes)] if is_factored else []),
        )
    console.print(table)


def _print_memory(console: Console, memory: RankMemory) -> None:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state, of what it owns": memory.optimizer,
        "packed weights": memory.packed_weights,
        "batch": memory.batch,
        "communication buffers": memory.buffers,
        **{f"activations: {part}": size for part, size in memory.activations.items()},
        "transient": memory.transient,
        "or else, in the update": memory.update,
    }
    console.print(f"Memory of a step, GiB (activations of {memory.in_flight} passes)")
    for name, size in [*parts.items(), ("peak", memory.peak)]:
        console.print(f"  {name:<34}{_gib(size):>10}")


def _print_volume(console: Console, volume: CommunicationVolume) -> None:
    if not volume.traffic:
        return
    table = _table("\nCommunication of a step")
    for heading in ("group", "kind", "calls", "GiB handed over", "GiB sent to others"):
        table.add_column(heading, justify="left" if heading in ("group", "kind") else "right")
    for (group, kind), traffic in volume.traffic.items():
        table.add_row(group, str(kind), f"{traffic.calls:,}", _gib(traffic.payload), _gib(traffic.wire))
    console.print(table)


# ------------------------------------------------------------------------------------- rendering


def _print_assumptions(console: Console, assumed: Assumptions) -> None:
    kernels = "native operations" if assumed.native else "torch operations"
    documents = "several documents" if assumed.several_documents else "one document"
    device = "a GPU" if assumed.device == "cuda" else "the CPU"
    console.print(
        f"Taken for granted: {device}, {kernels}, {documents} per row, experts {assumed.imbalance:g} times as busy as "
        "at balance. Memory is that of tensors: allocators, programs and communication libraries need more."
    )


def _contents(spec: ModelSpec, stage: Stage, mtp_depths: int) -> str:
    """A stage in words: its layers by kind."""
    from steptron.model.layer_spec import MoeFfnSpec
    from steptron.planning.layer_table import index_ranges

    parts = ["embedding"] if stage.is_first else []
    kinds: dict[str, list[int]] = {}
    for index in stage.layers:
        layer = spec.layers[index]
        ffn = "MoE" if isinstance(layer.ffn, MoeFfnSpec) else "dense"
        kinds.setdefault(f"{layer.attention.kind.value} {ffn}", []).append(index)
    if stage.layers:
        listed = "; ".join(f"{kind} {index_ranges(indices)}" for kind, indices in kinds.items())
        parts.append(f"layer{'' if len(stage.layers) == 1 else 's'} {listed}")
    if stage.is_last:
        idle = len(spec.mtp) - mtp_depths
        if spec.mtp:
            parts.append(f"{len(spec.mtp)} MTP" + (f" ({idle} idle)" if idle else ""))
        parts.append("heads")
    return ", ".join(parts) if parts else "nothing"


def _ranks(ranks: Sequence[int]) -> str:
    """Numbers at equal distances in short: ``64: 7 to 511 by 8``."""
    if not ranks:
        return "-"
    steps = {second - first for first, second in itertools.pairwise(ranks)}
    if len(ranks) == 1:
        return f"1: {ranks[0]}"
    if len(steps) == 1 and len(ranks) > 2:
        (step,) = steps
        return f"{len(ranks):,}: {ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"{len(ranks):,}: " + ", ".join(map(str, ranks))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}" if size >= 0.995 * 2**30 else f"{size / 2**30:.3f}"


def _exact(amount: float) -> str:
    return f"{amount:,.0f}"


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
