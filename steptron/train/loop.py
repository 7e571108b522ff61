"""The pre-training loop."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from steptron.checkpoint import loading
from steptron.checkpoint.fit import Filling
from steptron.checkpoint.folder import checkpoint_folder, delete_partial_folders
from steptron.checkpoint.manifest import Manifest, Progress, read_config, read_manifest
from steptron.checkpoint.newest import Newest, newest_valid
from steptron.checkpoint.resume import changes, differences, newly_trained
from steptron.checkpoint.weights import Weights, open_weights, refuse_damaged, same_on_every_rank
from steptron.config.batch_schedule import BatchSchedule
from steptron.config.stages import Curriculum, Stage
from steptron.config.summary import describe_stage, summary
from steptron.data.batch import MicroBatch
from steptron.data.manifest import content_hashes
from steptron.data.sources import open_source
from steptron.data.spans import spans
from steptron.errors import UserError
from steptron.model.chunks import ModelChunks
from steptron.model.kernels import describe_kernels
from steptron.model.layer_spec import model_spec
from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.diagnostics import MuonDiagnostics, muon_of
from steptron.optim.schedule import bias_update_rate, learning_rate
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.replica_check import check_replicas
from steptron.planning.parameters import count_parameters
from steptron.platform import determinism
from steptron.platform.distributed import on_first_rank
from steptron.platform.random_state import seed_generators
from steptron.telemetry.off import NoTelemetry
from steptron.telemetry.stopwatch import Stopwatch
from steptron.train.checkpointing import Checkpointing
from steptron.train.clone_mtp import clone_mtp
from steptron.train.faults import FaultPolicy, LossSpikes, RollBack
from steptron.train.feed import global_batch
from steptron.train.messages import say
from steptron.train.meter import Meter
from steptron.train.muon_log import FOLDER as MUON_FOLDER
from steptron.train.muon_log import MuonLog
from steptron.train.ownership import report_ownership
from steptron.train.plot import plot_losses
from steptron.train.records import EventRecord
from steptron.train.sinks import LOG_NAME, Sinks, make_sinks
from steptron.train.step import Flags, RejectedStep, TrainStep
from steptron.train.stop import StopRequest
from steptron.train.validation import open_domains, unigram_entropy, validate

if TYPE_CHECKING:
    from steptron.profiling.profiler import StepProfiler
    from steptron.profiling.request import ProfileRequest


def pretrain(
    curriculum: Curriculum,
    device: torch.device,
    stop: StopRequest,
    fresh: bool = False,
    profile: ProfileRequest | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> bool:
    """Trains through all stages of a run.

    The next stage starts as a run does that goes on from the checkpoint at the end of the one before: what switches is
    what resumes.

    Args:
        stop: ends the run after the current step, or before the first one, whichever process was asked.
        curriculum, device, fresh, profile, progress: see :class:`Pretraining`.

    Returns:
        Whether the run is complete; False when it was asked to stop, and wrote a checkpoint if it made a step.
    """
    mesh = build_mesh(curriculum.stages[0].config.parallel)
    while True:
        run = Pretraining(curriculum, mesh, device, fresh, profile, progress)
        if not run.run(stop):
            return False
        if run.stage is curriculum.stages[-1]:
            return True
        fresh = False
        # Its memory is what the next stage's model takes.
        del run
        gc.unfreeze()
        gc.collect()


class Pretraining:
    """A stage of a run: data, step, records and checkpoints put together. Whoever makes it holds the folder
    (``run_lock``). The newest checkpoint says which stage goes on.

    Args:
        curriculum: the whole run's configuration, already checked against the world size.
        mesh: the process groups.
        device: of this process, whose default process group exists.
        fresh: start over, deleting the run's earlier checkpoints and log.
        profile: steps and ranks to profile.
        progress: told again and again what the run does next; the time in between is what a step takes.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        mesh: Mesh,
        device: torch.device,
        fresh: bool = False,
        profile: ProfileRequest | None = None,
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._doing = progress
        self.profile = profile
        self.device = device
        self.mesh = mesh
        self.is_reporter = dist.get_rank() == 0
        self._say: Callable[[str], None] = say if self.is_reporter else _say_nothing
        self.curriculum = curriculum
        # What is the same in all stages tells where checkpoints are; they tell the stage.
        self.config = curriculum.stages[0].config
        newest, damaged = Newest(None, frozenset()) if fresh else self._newest_checkpoint()
        self.stage: Stage = curriculum.after(0 if newest is None else _steps_done(newest))
        self.config = config = self.stage.config
        determinism.use_deterministic_algorithms(config.train.deterministic)
        self.train_data = open_source(
            config.data.train,
            "train",
            config.data,
            config.parallel.timeout_seconds,
            spans(curriculum.stages)[self.stage.number] if self.stage.name else None,
        )
        self.domains = open_domains(config)
        if not self.domains:
            self._say("no validation: the training data has no validation split, and data.validation is empty")
        for source in (self.train_data, *(domain.source for domain in self.domains)):
            source.check_vocabulary(config.model.vocab_size)
            self.train_data.check_same_tokenizer(source)
        self._datasets = [dataset.manifest.content_hash for dataset in self.train_data.datasets]
        seed_generators(config.train.seed, dist.get_rank())
        # What does not fit the checkpoint is refused before anything is built, written or deleted.
        changed, is_complete = ([], False) if newest is None else self._examine(newest)
        initial = self._initial_weights() if newest is None else None
        if fresh:
            self._delete_run(None if initial is None else initial.path)
        self._delete_leftovers()
        # The folder's table stays that of the run that has ended.
        show = None if is_complete else self._show_ownership
        self._stopwatch = None if config.telemetry.server is None else Stopwatch(device)
        self.step = TrainStep(config, self.mesh, self.device, initial, show, self._stopwatch)
        self.batches = BatchSchedule(config.train)
        self.checkpointing = Checkpointing(self.stage, self._datasets, self.step, self._say, damaged)
        self.policy = FaultPolicy(config.train.faults)
        self.progress = Progress() if newest is None else self._resume(newest, changed)

    def run(self, stop: StopRequest) -> bool:
        """Trains to the end of the stage.

        Args:
            stop: ends the run after the current step, or before the first one, whichever process was asked.

        Returns:
            Whether the stage is complete; False when it was asked to stop, and wrote a checkpoint if it made a step.
        """
        if self.progress.step >= self.stage.last_step:
            self._say(f"nothing to do: step {self.progress.step} of {self.curriculum.steps} is done")
            return True
        if stop.requested_anywhere():
            self._say(f"stopped as asked before step {self.progress.step + 1}; the same command goes on from there")
            return False
        self._describe()
        # What exists by now lives to the end; without this, collections keep looking through all of it: 45 ms each.
        gc.collect()
        gc.freeze()
        with self._profiler() as profiler:
            complete = self._train_with_logs(stop, profiler)
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
        ours = self.stage.consumed_tokens
        threads = f", {torch.get_num_threads()} threads each" if self.device.type == "cpu" else ""
        lines = [
            *([f"stage     {describe_stage(self.stage, self.curriculum)}"] if self.stage.name else []),
            *summary(config, processes),
            f"size      {counts.total:,} parameters with MTP; {counts.active_with_embedding_and_head:,} act on a token "
            "of the main model",
            f"data      {tokens:,} tokens; the {'stage' if self.stage.name else 'run'} takes {ours:,} "
            f"({ours / tokens:.2f} epochs)",
            f"on        {processes} x {self.device.type}{threads}; everything goes to {config.train.output}",
        ]
        consumed = self.progress.consumed_sequences - self.stage.first_sequence, self.stage.sequences
        if missing := len(self.train_data.missing_order_files(*consumed)):
            lines.append(
                f"orders    {missing} are not in data.index_cache: one process builds each when needed while others "
                "wait; `steptron data build-index` builds them ahead"
            )
        if self.device.type == "cpu":
            lines.append(f"computing {describe_kernels(self.step.kernels, config.train, config.parallel)}")
        self._say("\n".join(lines))

    def _train_with_logs(self, stop: StopRequest, profiler: StepProfiler | None) -> bool:
        """Trains to the end, with logs that are cut back to where the run goes on from after each fault."""
        events: list[EventRecord] = []
        missing: list[EventRecord] = []
        while True:
            try:
                with self._sinks() as sinks, self._diagnostics() as diagnostics, self._telemetry() as telemetry:
                    for event in missing:
                        sinks.write(event)
                    return self._train(stop, sinks, profiler, diagnostics, telemetry)
            except RollBack as fault:
                events.append(self._roll_back(fault))
            # Earlier ones are still in the log, but for those beyond a checkpoint older than theirs.
            missing = [event for event in events[:-1] if event.step > self.progress.step] + events[-1:]

    def _train(
        self,
        stop: StopRequest,
        sinks: Sinks,
        profiler: StepProfiler | None,
        diagnostics: MuonDiagnostics | None,
        telemetry: NoTelemetry,
    ) -> bool:
        train, stage = self.config.train, self.stage
        if stage.name and self.progress.step == stage.first_step:
            # Of the step that comes first, so that it is written again where the run goes on from the switch.
            sinks.write(EventRecord(stage.first_step + 1, "stage", describe_stage(stage, self.curriculum)))
        meter = Meter(self.config, self.mesh, self.device)
        spikes = LossSpikes(train.faults.loss_spike, self.progress.recent_losses)
        while self.progress.step < stage.last_step:
            index = self.progress.step
            self._doing(f"step {index + 1}")
            lr, bias_rate = self._rates(index - stage.first_step)
            batch_size = self.batches.global_batch_size(self.progress.consumed_sequences - stage.first_sequence)
            if profiler is not None and profiler.begin(index + 1):
                meter.restart()
            waited = time.perf_counter()
            batches = self._global_batch(self.progress.next_sequence - stage.first_sequence, batch_size)
            data_seconds = time.perf_counter() - waited
            if diagnostics is not None:
                diagnostics.begin(index + 1)
            telemetry.begin(index + 1)
            flags = Flags(stop.requested, self.checkpointing.is_written, telemetry.checkpoint_requested())
            rejected, result = None, None
            try:
                result = self.step.run(batches, lr, bias_rate, flags, self._judging(spikes))
                observed = result.observed
            except RejectedStep as fault:
                rejected, observed = fault, fault.observed
            if diagnostics is not None:
                diagnostics.end(index + 1)
            consumed = self.progress.consumed_tokens + observed.counts.valid
            norm = None if result is None else result.gradient_norm
            if stage.name and index == stage.first_step:
                telemetry.event("stage", stage.name)
            telemetry.end(observed, norm, consumed, {"train.learning_rate": lr, "train.batch_size": batch_size})
            if profiler is not None:
                profiler.end(index + 1, observed.counts.valid)
            if observed.all_written:
                self._doing(f"end of a checkpoint, at step {index + 1}")
                self.checkpointing.conclude()
            if rejected is None:
                self.policy.accepted(index + 1)
                spikes.accept(observed.losses.lm)
            else:
                telemetry.event("skipped", str(rejected))
                self._decide(rejected, batch_size)
            self.progress = replace(
                self.progress,
                step=index + 1,
                consumed_sequences=self.progress.consumed_sequences + batch_size,
                consumed_tokens=consumed,
                recent_losses=spikes.recent,
            )
            done = self.progress.step == stage.last_step
            stopping = observed.stop_requested and not done
            if result is None:
                sinks.write(EventRecord(index + 1, "skipped", str(rejected)))
            else:
                meter.count(result, data_seconds)
                if _due(self.progress.step, train.logging.every_steps) or done or stopping:
                    # Every rank takes part in the record; one writes it.
                    record = meter.record(self.progress, result, batch_size, lr, bias_rate)
                    sinks.write(record)
                    telemetry.note("train.model_tflops", record.model_tflops)
            validation_loss = None
            if self.domains and (_due(self.progress.step, train.validation.every_steps) or done):
                self._doing(f"validation at step {self.progress.step}")
                validation = validate(self.config, self.domains, self.step, self.mesh, self.progress.step)
                sinks.write(validation)
                validation_loss = validation.lm_loss
                telemetry.note("validation.lm_loss", validation_loss)
                meter.restart()
            # After the validation, whose loss it notes: a run that resumes has nothing to make up for.
            due = _due(self.progress.step, train.checkpoint.every_steps) or done
            asked = observed.save_requested and not due
            if (due or asked or stopping) and train.faults.replica_check_every_steps is not None:
                self._check_replicas()
            if due or asked or stopping:
                self._doing(f"checkpoint at step {self.progress.step}")
                if asked:
                    self._say(
                        f"step {self.progress.step}: a checkpoint, since an alert of the metrics server asks for it"
                    )
                last = done or stopping
                self.checkpointing.save(self.progress, validation_loss, clips=due, last=last, requested=asked)
                telemetry.event("checkpoint", "an alert asked for it" if observed.save_requested else "")
                meter.restart()
            if self.progress.step == self.curriculum.steps or stopping:
                telemetry.event("finished", "stopped as asked" if stopping else "")
            telemetry.send()
            if stopping:
                return False
            if profiler is not None and profiler.write():
                meter.restart()
        return True

    def _rates(self, step: int) -> tuple[float, float]:
        """Learning rate and bias update rate of a step of the stage, from 0."""
        steps, balance = self.config.train.steps, self.config.balance
        bias = 0.0 if balance.freeze_router else bias_update_rate(balance.bias, step, steps)
        return learning_rate(self.config.optimizer, step, steps), bias

    def _judging(self, spikes: LossSpikes) -> Callable[[float], str | None]:
        """What decides about the next update. Replicas are compared here: after forward and backward, and before the
        update gives every rank its owner's bits anew and hides what has happened to its own."""

        def judge(loss: float) -> str | None:
            if _due(self.progress.step + 1, self.config.train.faults.replica_check_every_steps):
                self._check_replicas()
            return spikes.judge(loss)

        return judge

    def _check_replicas(self) -> None:
        self._doing(f"comparison of replicas after step {self.progress.step}")
        try:
            check_replicas(self.step.chunks, self.step.optimizer, self.mesh, self.device, self.progress.step)
        except UserError:
            # What is being written was compared before it was copied.
            self.checkpointing.conclude()
            raise

    def _decide(self, rejected: RejectedStep, batch_size: int) -> None:
        """What to do about a step that was not made: returns where it is only passed over."""
        # What is being written is good: whatever comes next finds it.
        self.checkpointing.conclude()
        step = self.progress.step + 1
        if self.policy.decide(rejected, step) == "roll_back":
            raise RollBack(str(rejected), step, self.progress.next_sequence + batch_size)

    def _roll_back(self, fault: RollBack) -> EventRecord:
        """Loads the newest checkpoint (without one, the run's beginning) and leaves out the data up to the fault."""
        newest, damaged = self._newest_checkpoint()
        self.checkpointing.pass_over(damaged)
        if newest is None:
            raise UserError(
                f"training stopped at step {fault.step}: {fault.reason}\nthere is no checkpoint yet to roll back to: "
                "set train.checkpoint.every_steps lower, or another policy under train.faults"
            )
        if self.curriculum.after(_steps_done(newest)) is not self.stage:
            raise UserError(
                f"training stopped at step {fault.step}: {fault.reason}\nthe checkpoint to roll back to, {newest}, is "
                "of the stage before: the same command goes on from there"
            )
        progress = self._load(newest)
        if self.step.weight_clipping is not None:
            self.step.weight_clipping.restart()
        left_out = fault.stop - progress.consumed_sequences
        self.progress = replace(progress, left_out_sequences=left_out)
        return EventRecord(
            progress.step,
            "rolled back",
            f"from step {fault.step} to {newest}; sequences {progress.next_sequence} to {fault.stop - 1} of the data "
            f"are left out: {fault.reason}",
        )

    def _global_batch(self, first: int, batch_size: int) -> list[MicroBatch]:
        size = self.config.train.micro_batch_size
        return global_batch(self.train_data, first, batch_size, size, self.mesh, self.device)

    def _newest_checkpoint(self) -> Newest:
        train = self.config.train
        return newest_valid(train.output, train.checkpoint.verify == "checksums", self._say)

    def _initial_weights(self) -> Weights | None:
        if self.config.train.initial_weights is None:
            return None
        weights = same_on_every_rank(open_weights(self.config.train.initial_weights, Filling.of(self.config)))
        refuse_damaged(weights, self.config.train.checkpoint.verify == "checksums")
        noted = differences(weights.model, self.config.model, "model")
        noted = [text for text in noted if not text.startswith("model.init.")]
        lines = [f"changed: {text}" for text in noted] + weights.fit(model_spec(self.config.model)).notes()
        self._say("\n  ".join([f"starting from the weights of {weights.path}", *lines]))
        return weights

    def _examine(self, folder: Path) -> tuple[list[str], bool]:
        """What has changed since a checkpoint, and whether the run has ended with it.

        The stage that wrote it is compared with what it is now; that the next one differs is no change.
        """
        manifest = read_manifest(folder)
        saved, step = read_config(folder), _steps_done(folder)
        if self.stage.name and step > self.curriculum.steps:
            raise UserError(
                f"{folder}: the run is at step {step} already, beyond step {self.curriculum.steps}, with which "
                f"{self.stage.name} ends as the configuration is now"
            )
        stage = self.curriculum.before(step)
        datasets = (
            self._datasets
            if stage is self.stage
            else content_hashes(dataset.path for dataset in stage.config.data.train)
        )
        try:
            noted = changes(saved, stage.config, manifest, datasets)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error
        self._check_history(folder, manifest)
        return noted, step >= self.curriculum.steps

    def _check_history(self, folder: Path, manifest: Manifest) -> None:
        """A curriculum must lead to where the checkpoint is: schedules and data are counted from borders of stages."""
        step, stage = _steps_done(folder), self.curriculum.before(_steps_done(folder))
        was = manifest.stage
        if not stage.name and was is None:
            return
        is_now = (stage.name, stage.first_sequence, stage.sequences)
        if was is None or (was.name, was.first_sequence, was.sequences) != is_now:
            before = "without stages" if was is None else _described(was.name, was.first_sequence, was.sequences)
            raise UserError(
                f"{folder}: step {step} was made {before}; as the configuration is now it is made "
                f"{_described(*is_now) if stage.name else 'without stages'}. Set names, tokens, sequence lengths and "
                "batch sizes of the stages that have begun back (later ones may change), give another train.output, or "
                "start over with --fresh"
            )

    def _resume(self, folder: Path, changed: list[str]) -> Progress:
        progress = self._load(folder)
        self._say("\n  changed: ".join([f"resuming from {folder} (step {progress.step})", *changed]))
        return progress

    def _load(self, folder: Path) -> Progress:
        """Takes the state of a checkpoint of this stage, or of the end of the one before."""
        stage, depths = self.stage, self.config.loss.mtp_train_depths
        saved = self.curriculum.before(_steps_done(folder)).config
        begun = newly_trained(saved, self.config)
        progress = loading.load(folder, self.step.chunks, self.step.optimizer, self.mesh, begun)
        if progress.step > stage.first_step or stage.number == 0:
            return progress
        if stage.clone_mtp:
            clone_mtp(self.step.chunks, self.step.optimizer, self.mesh, depths)
            self._say(f"MTP depths 2 to {depths} begin as copies of depth 1")
        return replace(progress, left_out_sequences=0)

    def _delete_run(self, initial: Path | None) -> None:
        folder = self.config.train.output / "checkpoints"
        if initial is not None and initial.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"--fresh would delete {initial}, from which train.initial_weights starts: give another train.output, "
                "or copy that checkpoint elsewhere"
            )

        def delete() -> None:
            if folder.exists():
                shutil.rmtree(folder)
            (self.config.train.output / LOG_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.config.train.output / MUON_FOLDER, ignore_errors=True)

        on_first_rank("the earlier run cannot be deleted", delete)

    def _delete_leftovers(self) -> None:
        """What a killed save has left takes up room that the log and the next checkpoint may need."""
        root = self.config.train.output / "checkpoints"
        try:
            on_first_rank("what a killed save has left stays", lambda: delete_partial_folders(root))
        except UserError as error:
            self._say(str(error))

    def _sinks(self) -> Sinks:
        if not self.is_reporter:
            return Sinks([])
        try:
            return make_sinks(self.stage, self.progress.step)
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
        return StepProfiler(request, folder, targets, self.device, step.sharded.gather.wait)

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
        with log:
            yield MuonDiagnostics(muon, config, log, answers_for_cut=self.mesh.tensor_rank == 0)

    def _telemetry(self) -> NoTelemetry:
        if self._stopwatch is None:
            return NoTelemetry()
        from steptron.telemetry.run import Telemetry

        return Telemetry(self.config, self.step, self._stopwatch, self._say)

    def _show_ownership(self, chunks: ModelChunks, plans: Sequence[BufferPlan]) -> None:
        table = report_ownership(self.config, chunks, plans, self.mesh)
        if table is not None:
            self._say(table)

    def _plot(self) -> None:
        output = self.config.train.output
        lines = {"unigram entropy of the validation data": unigram_entropy(self.domains)} if self.domains else {}
        try:
            plot_losses(output / LOG_NAME, output / "loss.png", lines)
        except (OSError, ValueError) as error:
            self._say(f"no loss plot: {error}")
            return
        self._say(f"loss plot: {output / 'loss.png'}")


def _steps_done(folder: Path) -> int:
    """Steps behind a checkpoint of a run; 0 of one that holds a model alone, which says so where it is loaded."""
    progress = read_manifest(folder).progress
    return 0 if progress is None else progress.step


def _described(name: str, first_sequence: int, sequences: int) -> str:
    return f"in stage {name}, of {sequences:,} sequences after {first_sequence:,}"


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _say_nothing(text: str) -> None:
    """On ranks that do not report."""
