"""``steptron model logits``, ``trace`` and ``trace-diff``: run a model's weights and compare what they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steptron.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch

    from steptron.checkpoint.weights import Weights
    from steptron.config.schema import PretrainConfig
    from steptron.inspection.archive import Array
    from steptron.inspection.configuration import InspectionConfig
    from steptron.inspection.forward import LoadedModel
    from steptron.inspection.trace_diff import SiteDifference, TraceDifference
    from steptron.model.layer_spec import ModelSpec


_Weights = Annotated[
    Path,
    typer.Argument(
        metavar="WEIGHTS",
        help="A released model's folder, a checkpoint, or a run's folder (its newest checkpoint).",
    ),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=c]...",
        help="Overrides of the sections model (such as model.sliding.window=513) and parallel.",
    ),
]
_InputIds = Annotated[
    Path, typer.Option(metavar="IDS.npy", help="Token ids, int64 of shape (batch, seq), written by numpy.save.")
]
_Nproc = Annotated[
    int | None, typer.Option(min=1, help="Local processes to start; 1 by default. Not under torchrun or srun.")
]
_Precision = Annotated[
    Literal["fp32", "bf16"],
    typer.Option(help="Dtype of the run, whatever is stored. Implementations can only be compared closely in fp32."),
]
_Replay = Annotated[
    Path | None,
    typer.Option(metavar="TRACE.npz", help="Send every token to the experts that this trace recorded."),
]


def logits(
    weights: _Weights,
    input_ids: _InputIds,
    out: Annotated[Path, typer.Option(metavar="OUT.npz", help="File to write; an older one is replaced.")],
    overrides: _Overrides = None,
    nproc: _Nproc = None,
    precision: _Precision = "fp32",
    replay_routing: _Replay = None,
) -> None:
    """Write the logits of token ids: `logits` (batch, seq, vocab) and `mtp_logits` (depths, batch, seq, vocab).

    Both are float32. MTP depth k at position t predicts token t + 2 + k; the tokens past the end that it reads are
    id 0. Any layout gives the same, such as --nproc 2 parallel.pipeline=2.
    """
    request = _Request(weights, input_ids, out, tuple(overrides or ()), precision, replay_routing)
    job = request.start("logits", nproc)

    def compute(model: LoadedModel) -> Iterator[tuple[str, Array]]:
        from steptron.inspection.logits import logits

        return logits(model, job.ids_BS, job.experts)

    job.run(compute)


def trace(
    weights: _Weights,
    input_ids: _InputIds,
    out: Annotated[Path, typer.Option(metavar="TRACE.npz", help="File to write; an older one is replaced.")],
    overrides: _Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Sites to record, such as 'layers.3.*'; may be repeated. All by default."),
    ] = None,
    nproc: _Nproc = None,
    precision: _Precision = "fp32",
    replay_routing: _Replay = None,
    implementation: Annotated[
        Literal["steptron", "transformers"],
        typer.Option(help="Whose model to run; that of transformers without MTP and in one process."),
    ] = "steptron",
) -> None:
    """Record named activations (batch, seq, ...) of a forward pass, in its order, for `steptron model trace-diff`.

    Sites are, for every layer, what enters and leaves attention and feed-forward, the router's scores, experts
    (ascending) and weights (in that order), and the layer's output; the embedding, the final norm and the logits; and
    the same of every MTP depth.
    """
    request = _Request(weights, input_ids, out, tuple(overrides or ()), precision, replay_routing)
    if implementation == "transformers":
        request.trace_transformers(nproc, only or [])
        return
    patterns = only or []
    job = request.start("trace", nproc, patterns)

    def compute(model: LoadedModel) -> Iterator[tuple[str, Array]]:
        from steptron.inspection.sites import choose, sites
        from steptron.inspection.trace import trace

        chosen = choose(sites(model.chunks.spec), patterns)
        return _with_ids(job.ids_BS, trace(model, job.ids_BS, chosen, job.experts))

    job.run(compute)


def trace_diff(
    first: Annotated[Path, typer.Argument(metavar="A.npz", help="A trace; its order of sites counts.")],
    second: Annotated[Path, typer.Argument(metavar="B.npz", help="The trace to compare with it.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest relative difference (norm over norm) that counts as equal.")
    ] = 1e-4,
) -> None:
    """Compare two traces and name the first site where they part.

    Exit code 0: equal within the tolerance; 1: parted; 2: bad input.
    """
    from steptron.inspection.trace_diff import compare_traces

    difference = compare_traces(first, second, tolerance)
    _print_difference(difference)
    if difference.first_parted is not None:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    weights: Path
    input_ids: Path
    out: Path
    overrides: tuple[str, ...]
    precision: Literal["fp32", "bf16"]
    replay: Path | None

    def start(self, command: str, nproc: int | None, only: Sequence[str] = ()) -> _Job:
        """Checks everything; then, where processes are to be started, does so and exits with their code."""
        from steptron.platform import launch

        joined = launch.joined_size(nproc)
        world_size = joined or nproc or 1
        job = self._check(world_size, only)
        if joined is None and world_size > 1:
            raise typer.Exit(launch.run_local(world_size, self._arguments(command, job.weights.path, only)))
        return job

    def trace_transformers(self, nproc: int | None, only: Sequence[str]) -> None:
        """Records a trace of transformers' model in this process."""
        from steptron.platform.world import world

        asked = [f"--nproc {nproc}"] if nproc not in (None, 1) else []
        asked += [override for override in self.overrides if override.strip().startswith("parallel.")]
        if asked or world().size > 1:
            raise UserError(
                f"--implementation transformers runs in one process: leave out {', '.join(asked) or 'the launcher'}"
            )
        ids_BS, opened, inspection = self._read()

        from steptron.inspection.archive import write_arrays
        from steptron.inspection.sites import choose
        from steptron.inspection.transformers_trace import (
            load_transformers,
            trace_transformers,
            transformers_sites,
            without_mtp,
        )
        from steptron.model.layer_spec import model_spec

        model = without_mtp(inspection.model)
        spec = model_spec(model)
        chosen = choose(transformers_sites(spec), only)
        experts = self._experts(spec, ids_BS)
        trunk = load_transformers(opened, model, self.precision)
        write_arrays(self.out, _with_ids(ids_BS, trace_transformers(trunk, ids_BS, chosen, experts)))

    def _check(self, world_size: int, only: Sequence[str]) -> _Job:
        ids_BS, opened, inspection = self._read()
        from steptron.inspection.configuration import run_config
        from steptron.inspection.sites import choose, sites
        from steptron.model.layer_spec import model_spec

        config = run_config(inspection, self.precision, world_size)
        if config.parallel.tensor > 1:
            # As in training; read by the CUDA driver when it starts.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        spec = model_spec(config.model)
        choose(sites(spec), only)
        return _Job(self.out, ids_BS, opened, config, self._experts(spec, ids_BS))

    def _read(self) -> tuple[torch.Tensor, Weights, InspectionConfig]:
        from steptron.inspection.archive import output_problem
        from steptron.inspection.inputs import check_vocabulary, read_ids

        problems, ids = [], None
        try:
            ids = read_ids(self.input_ids)
        except UserError as error:
            problems.append(str(error))
        if (problem := output_problem(self.out)) is not None:
            problems.append(problem)
        elif self.out.exists() and any(self.out.samefile(read) for read in self._inputs()):
            problems.append(f"--out {self.out} is one of the files that are read: name another one")
        if self.replay is not None and not self.replay.is_file():
            problems.append(f"--replay-routing {self.replay}: there is no such file")
        if problems or ids is None:
            raise ConfigError("the command line", problems)
        _prepare_megatron()
        import torch

        from steptron.checkpoint.weights import open_weights
        from steptron.inspection.configuration import overridden

        opened = open_weights(self.weights)
        inspection = overridden(opened.model, self.overrides)
        check_vocabulary(ids, inspection.model.vocab_size)
        return torch.from_numpy(ids), opened, inspection

    def _inputs(self) -> list[Path]:
        return [path for path in (self.input_ids, self.replay) if path is not None and path.exists()]

    def _experts(self, spec: ModelSpec, ids_BS: torch.Tensor) -> dict[int, torch.Tensor] | None:
        if self.replay is None:
            return None
        from steptron.inspection.replay import read_routing

        return read_routing(self.replay, spec, ids_BS.numpy())

    def _arguments(self, command: str, weights: Path, only: Sequence[str]) -> list[str]:
        """The command line of each process."""
        arguments = ["model", command, str(weights), *self.overrides]
        arguments += ["--input-ids", str(self.input_ids), "--out", str(self.out), "--precision", self.precision]
        arguments += [] if self.replay is None else ["--replay-routing", str(self.replay)]
        return [*arguments, *(argument for pattern in only for argument in ("--only", pattern))]


@dataclass(frozen=True)
class _Job:
    """A checked request, in a process that takes part."""

    out: Path
    ids_BS: torch.Tensor
    weights: Weights
    config: PretrainConfig
    experts: dict[int, torch.Tensor] | None

    def run(self, compute: Callable[[LoadedModel], Iterator[tuple[str, Array]]]) -> None:
        """Joins the other processes and loads the model; rank 0 writes what is computed."""
        from steptron.platform import distributed

        device, _ = distributed.start("auto", None, self.config.parallel.timeout_seconds)

        from steptron.checkpoint.weights import same_on_every_rank
        from steptron.inspection.archive import write_arrays
        from steptron.inspection.forward import load_model

        arrays = compute(load_model(same_on_every_rank(self.weights), self.config, device))
        if distributed.world().rank == 0:
            write_arrays(self.out, arrays)
            typer.echo(f"{self.out} written")
        else:
            for _ in arrays:
                pass
        distributed.shutdown()


def _with_ids(ids_BS: torch.Tensor, arrays: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    from steptron.inspection.archive import INPUT_IDS

    yield INPUT_IDS, ids_BS.numpy()
    yield from arrays


def _prepare_megatron() -> None:
    """Before Megatron-Core's first import, as ``platform.distributed.start`` does it."""
    import torch

    from steptron.platform import megatron_cpu

    if not torch.cuda.is_available():
        megatron_cpu.install()


def _print_difference(difference: TraceDifference) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("site")
    for heading in ("max abs", "relative", "rerouted tokens"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for site in difference.sites:
        routed = "" if site.rerouted is None else f"{site.rerouted} of {site.tokens}"
        numbers = ["", ""] if site.rerouted is not None else [f"{site.max_abs:.2e}", f"{site.relative:.2e}"]
        table.add_row(site.name, *numbers, routed, "parted" if site.parted else "")
    console.print(table)
    for which, names in (("first", difference.only_in_first), ("second", difference.only_in_second)):
        if names:
            console.print(f"only in the {which}: {', '.join(names)}", soft_wrap=True)
    console.print(_verdict(difference.first_parted, len(difference.sites)), soft_wrap=True)


def _verdict(first: SiteDifference | None, sites: int) -> str:
    if first is None:
        return f"equal within the tolerance at {sites} site{'' if sites == 1 else 's'}"
    if first.rerouted is not None:
        return f"parted first at {first.name}: {first.rerouted} of {first.tokens} tokens went to other experts"
    return f"parted first at {first.name}: max abs {first.max_abs:.2e}, relative {first.relative:.2e}"
