"""The pre-training loop."""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from steptron.checkpoint import save_load
from steptron.checkpoint.folder import checkpoint_folder, list_checkpoints
from steptron.checkpoint.manifest import Progress, read_config, read_manifest
from steptron.checkpoint.resume import changes, differences
from steptron.checkpoint.weights import Weights, open_weights, same_on_every_rank
from steptron.config.schema import PretrainConfig
from steptron.config.summary import summary
from steptron.data.batch import MicroBatch
from steptron.data.sampler import SampleSource, validation_datasets
from steptron.errors import UserError
from steptron.model.chunks import ModelChunks
from steptron.model.kernels import describe_kernels
from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.diagnostics import MuonDiagnostics, muon_of
from steptron.optim.schedule import bias_update_rate, learning_rate
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.planning.parameters import count_parameters
from steptron.platform import determinism
from steptron.platform.distributed import on_first_rank
from steptron.train.batch_schedule import BatchSchedule
from steptron.train.meter import Meter
from steptron.train.muon_log import FOLDER as MUON_FOLDER
from steptron.train.muon_log import MuonLog
from steptron.train.ownership import report_ownership
from steptron.train.plot import plot_losses
from steptron.train.records import ValidationRecord
from steptron.train.run_lock import RunLock
from steptron.train.sinks import LOG_NAME, Sinks, make_sinks
from steptron.train.step import NonFiniteError, TrainStep
from steptron.train.stop import StopRequest

if TYPE_CHECKING:
    from steptron.profiling.profiler import StepProfiler
    from steptron.profiling.request import ProfileRequest


class Pretraining:
    """One run: data, step, records and checkpoints put together.

    Args:
        config: the whole configuration, already checked against the world size.
        device: of this process, whose default process group exists.
        fresh: start over, deleting the run's earlier checkpoints and log.
        profile: steps and ranks to profile.
    """

    def __init__(
        self,
        config: PretrainConfig,
        device: torch.device,
        fresh: bool = False,
        profile: ProfileRequest | None = None,
    ) -> None:
        self.config = config
        self.profile = profile
        self.device = device
        determinism.use_deterministic_algorithms(config.train.deterministic)
        self.is_reporter = dist.get_rank() == 0
        self.mesh: Mesh = build_mesh(config.parallel)
        on_first_rank("the run cannot start", self._take_folder)
        self.train_data = SampleSource(config.data.train, "train", config.data, config.parallel.timeout_seconds)
        self.validation_data = self._open_validation()
        for source in filter(None, (self.train_data, self.validation_data)):
            source.check_vocabulary(config.model.vocab_size)
        if self.validation_data is not None:
            self.train_data.check_same_tokenizer(self.validation_data)
        self._datasets = [dataset.manifest.content_hash for dataset in self.train_data.datasets]
        if fresh:
            self._delete_run()
        newest = self._newest_checkpoint()
        # What does not fit the checkpoint is refused before anything is built or written.
        changed, is_complete = ([], False) if newest is None else self._examine(newest)
        initial = self._initial_weights() if newest is None else None
        # The folder's table stays that of the run that has ended.
        show = None if is_complete else self._show_ownership
        self.step = TrainStep(config, self.mesh, self.device, initial, before_buffers=show)
        self.batches = BatchSchedule(config.train)
        self.progress = Progress() if newest is None else self._resume(newest, changed)

    def run(self) -> bool:
        """Trains to the configured number of steps.

        Returns:
            Whether the run is complete; False when it was asked to stop and wrote a checkpoint.
        """
        if self.progress.step >= self.config.train.steps:
            self._say(f"nothing to do: step {self.progress.step} of {self.config.train.steps} is done")
            return True
        self._describe()
        # What exists by now lives to the end; without this, collections keep looking through all of it: 45 ms each.
        gc.collect()
        gc.freeze()
        with (
            StopRequest() as stop,
            self._sinks() as sinks,
            self._profiler() as profiler,
            self._diagnostics() as diagnostics,
        ):
            complete = self._train(stop, sinks, profiler, diagnostics)
        if not complete:
            self._say(f"stopped as asked after step {self.progress.step}; the same command goes on from there")
        if self.is_reporter:
            self._plot()
        self._say(f"checkpoint: {checkpoint_folder(self.config.train.output, self.progress.step)}")
        return complete

    def _describe(self) -> None:
        """Says what is about to run."""
        config, processes = self.config, dist.get_world_size()
        counts = count_parameters(self.step.spec)
        tokens = sum(dataset.num_tokens for dataset in self.train_data.datasets)
        ours = self.batches.consumed_after(config.train.steps) * config.data.sequence_length
        threads = f", {torch.get_num_threads()} threads each" if self.device.type == "cpu" else ""
        lines = [
            *summary(config, processes),
            f"size      {counts.total:,} parameters with MTP; {counts.active_with_embedding_and_head:,} act on a token "
            "of the main model",
            f"data      {tokens:,} tokens; the run takes {ours:,} ({ours / tokens:.2f} epochs)",
            f"on        {processes} x {self.device.type}{threads}; everything goes to {config.train.output}",
        ]
        consumed = self.progress.consumed_sequences, self.batches.consumed_after(config.train.steps)
        if missing := len(self.train_data.missing_order_files(*consumed)):
            lines.append(
                f"orders    {missing} are not in data.index_cache: one process builds each when needed while others "
                "wait; `steptron data build-index` builds them ahead"
            )
        if self.device.type == "cpu":
            lines.append(f"computing {describe_kernels(self.step.kernels, config.train, config.parallel)}")
        self._say("\n".join(lines))

    def _train(
        self, stop: StopRequest, sinks: Sinks, profiler: StepProfiler | None, diagnostics: MuonDiagnostics | None
    ) -> bool:
        train = self.config.train
        meter = Meter(self.config, self.mesh, self.device)
        while self.progress.step < train.steps:
            index = self.progress.step
            lr = learning_rate(self.config.optimizer, index, train.steps)
            bias_rate = 0.0 if self.config.balance.freeze_router else bias_update_rate(self.config.balance.bias, index)
            batch_size = self.batches.global_batch_size(self.progress.consumed_sequences)
            if profiler is not None and profiler.begin(index + 1):
                meter.restart()
            waited = time.perf_counter()
            batches = self._global_batch(self.train_data, self.progress.consumed_sequences, batch_size)
            data_seconds = time.perf_counter() - waited
            if diagnostics is not None:
                diagnostics.begin(index + 1)
            try:
                result = self.step.run(batches, lr, bias_rate, stop.requested)
            except NonFiniteError as error:
                raise UserError(f"training stopped at step {index + 1}: {error}") from error
            if diagnostics is not None:
                diagnostics.end(index + 1)
            if profiler is not None:
                profiler.end(index + 1, result.observed.counts.valid)
            self.progress = Progress(
                step=index + 1,
                consumed_sequences=self.progress.consumed_sequences + batch_size,
                consumed_tokens=self.progress.consumed_tokens + result.observed.counts.valid,
            )
            meter.count(result, data_seconds)
            done = self.progress.step == train.steps
            stopping = result.observed.stop_requested and not done
            if _due(self.progress.step, train.logging.every_steps) or done or stopping:
                # Every rank takes part in the record; one writes it.
                sinks.write(meter.record(self.progress, result, batch_size, lr, bias_rate))
            due = _due(self.progress.step, train.checkpoint.every_steps) or done
            if due or stopping:
                self._save(clips=due)
                meter.restart()
            if stopping:
                return False
            if profiler is not None and profiler.write():
                meter.restart()
            if _due(self.progress.step, train.validation.every_steps) or done:
                self._validate(sinks)
                meter.restart()
        return True

    def _global_batch(self, source: SampleSource, first: int, batch_size: int) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of the sequences first … first + batch_size - 1.

        Micro-batch j of the global batch is the same sequences under every layout; data-parallel
        ranks take them in turn.
        """
        size = self.config.train.micro_batch_size
        own = range(first + self.mesh.data_rank * size, first + batch_size, self.mesh.data_size * size)
        return [source.micro_batch(start, size).to(self.device) for start in own]

    def _take_folder(self) -> None:
        self._lock = RunLock(self.config.train.output)

    def _open_validation(self) -> SampleSource | None:
        """The data to validate on; None where there is nothing to validate on."""
        data = self.config.data
        datasets = validation_datasets(data)
        if not datasets:
            self._say("no validation: the training data has no validation split, and data.validation is empty")
            return None
        return SampleSource(datasets, "validation", data, self.config.parallel.timeout_seconds)

    def _validate(self, sinks: Sinks) -> None:
        """Mean losses over the first sequences of the validation split, always the same ones."""
        if self.validation_data is None:
            return
        batch_size = self.config.train.global_batch_size
        available = -(-(self.validation_data.num_samples or 0) // batch_size)
        sums = torch.zeros(1 + self.config.loss.mtp_train_depths, dtype=torch.float64)
        targets = torch.zeros_like(sums)
        for i in range(min(self.config.train.validation.batches, available)):
            batch_sums, counts = self.step.evaluate(
                self._global_batch(self.validation_data, i * batch_size, batch_size)
            )
            sums += batch_sums.cpu()
            targets += torch.tensor(counts.targets, dtype=torch.float64)
        lm, *mtp = (sums / targets).tolist()  # NaN without a target
        bits_per_byte = lm / math.log(2) / self.validation_data.bytes_per_token
        sinks.write(ValidationRecord(self.progress.step, lm, tuple(mtp), bits_per_byte))

    def _save(self, clips: bool) -> None:
        """Writes a checkpoint; ``clips`` is False where only a signal asks for it: the run would not clip there."""
        if not self.step.parameters_are_finite():
            raise UserError(
                f"after step {self.progress.step} these parameters are no longer finite: "
                f"{self.step.describe_non_finite_parameters()}. No checkpoint was written, the last one is as it was. "
                "Lower optimizer.lr (or the lr_multiplier of their roles) or clip gradients (optimizer.clip_grad_norm)"
            )
        # Before the checkpoint is written, so that a run that resumes from it goes on as this one does.
        clipping = self.step.weight_clipping
        if clips and clipping is not None and (clipped := clipping.apply()):
            self._say(f"step {self.progress.step}: {clipping.describe(clipped)}")
        save_load.save(self.config, self.progress, self._datasets, self.step.chunks, self.step.optimizer, self.mesh)

    def _newest_checkpoint(self) -> Path | None:
        # One rank decides for all: others may see another state of a shared folder.
        newest: list[Path | None] = [next(reversed(list_checkpoints(self.config.train.output)), None)]
        dist.broadcast_object_list(newest, src=0)
        return newest[0]

    def _initial_weights(self) -> Weights | None:
        if self.config.train.initial_weights is None:
            return None
        weights = same_on_every_rank(open_weights(self.config.train.initial_weights))
        noted = differences(weights.model, self.config.model, "model")
        noted = [text for text in noted if not text.startswith("model.init.")]
        self._say("\n  changed: ".join([f"starting from the weights of {weights.path}", *noted]))
        return weights

    def _examine(self, folder: Path) -> tuple[list[str], bool]:
        """What has changed since a checkpoint, and whether the run has ended with it."""
        manifest = read_manifest(folder)
        noted = changes(read_config(folder), self.config, manifest, self._datasets)
        return noted, manifest.progress is not None and manifest.progress.step >= self.config.train.steps

    def _resume(self, folder: Path, changed: list[str]) -> Progress:
        progress = save_load.load(folder, self.step.chunks, self.step.optimizer, self.mesh)
        self._say("\n  changed: ".join([f"resuming from {folder} (step {progress.step})", *changed]))
        return progress

    def _delete_run(self) -> None:
        def delete() -> None:
            folder = self.config.train.output / "checkpoints"
            if folder.exists():
                shutil.rmtree(folder)
            (self.config.train.output / LOG_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.config.train.output / MUON_FOLDER, ignore_errors=True)

        on_first_rank("the earlier run cannot be deleted", delete)

    def _sinks(self) -> Sinks:
        if not self.is_reporter:
            return Sinks([])
        try:
            return make_sinks(self.config, self.config.train.output, self.progress.step)
        except OSError as error:
            raise UserError(f"the run's log cannot be written: {error}") from error

    def _profiler(self) -> contextlib.AbstractContextManager[StepProfiler | None]:
        if self.profile is None:
            return contextlib.nullcontext()
        from steptron.profiling.phases import training_targets
        from steptron.profiling.profiler import StepProfiler

        request, notes = self.profile.after(self.progress.step)
        folder = self.config.train.output / "profile"
        ranks = f"rank{'s' if len(request.ranks) > 1 else ''} {', '.join(map(str, request.ranks))}"
        for window in request.windows:
            notes.append(f"profile   {window}, {ranks}, to {folder}")
        self._say("\n".join(notes))
        if dist.get_rank() not in request.ranks:
            return contextlib.nullcontext()
        step = self.step
        targets = training_targets(
            step.sharded.chunks, step.engine_config, step.optimizer, step.sharded.gather, self.train_data
        )
        return StepProfiler(request, folder, targets, self.device)

    @contextlib.contextmanager
    def _diagnostics(self) -> Iterator[MuonDiagnostics | None]:
        config, muon = self.config.optimizer.muon.diagnostics, muon_of(self.step.optimizer)
        if config.every_steps is None or muon is None:
            yield None
            return
        try:
            log = MuonLog(self.config.train.output, dist.get_rank(), dist.get_world_size(), self.progress.step)
        except OSError as error:
            raise UserError(f"Muon's diagnostics cannot be written: {error}") from error
        with contextlib.closing(log):
            yield MuonDiagnostics(muon, config, log, answers_for_cut=self.mesh.tensor_rank == 0)

    def _show_ownership(self, chunks: ModelChunks, plans: Sequence[BufferPlan]) -> None:
        table = report_ownership(self.config, chunks, plans, self.mesh)
        if table is not None:
            self._say(table)

    def _plot(self) -> None:
        output = self.config.train.output
        source = self.validation_data
        lines = {} if source is None else {"unigram entropy of the validation data": source.unigram_entropy}
        try:
            plot_losses(output / LOG_NAME, output / "loss.png", lines)
        except (OSError, ValueError) as error:
            self._say(f"no loss plot: {error}")
            return
        self._say(f"loss plot: {output / 'loss.png'}")

    def _say(self, text: str) -> None:
        if self.is_reporter:
            print(text, flush=True)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
