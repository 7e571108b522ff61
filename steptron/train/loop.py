"""The pre-training loop."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

from steptron.checkpoint import save_load
from steptron.checkpoint.folder import list_checkpoints
from steptron.checkpoint.save_load import Progress, on_first_rank
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.data.sampler import SampleSource
from steptron.errors import UserError
from steptron.optim.schedule import bias_update_rate, learning_rate
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.platform import determinism
from steptron.train.batch_schedule import BatchSchedule
from steptron.train.meter import Meter
from steptron.train.plot import plot_losses
from steptron.train.records import ValidationRecord
from steptron.train.sinks import LOG_NAME, Sinks, make_sinks
from steptron.train.step import NonFiniteError, TrainStep
from steptron.train.stop import StopRequest


class Pretraining:
    """One run: data, step, records and checkpoints put together.

    Args:
        config: the whole configuration, already checked against the world size.
        device: of this process, whose default process group exists.
        fresh: start over, deleting the run's earlier checkpoints and log.
    """

    def __init__(self, config: PretrainConfig, device: torch.device, fresh: bool = False) -> None:
        self.config = config
        self.device = device
        determinism.use_deterministic_algorithms(config.train.deterministic)
        self.is_reporter = dist.get_rank() == 0
        self.mesh: Mesh = build_mesh(config.parallel)
        self.train_data = SampleSource(config.data.train, "train", config.data)
        self.validation_data = SampleSource(config.data.validation or config.data.train, "validation", config.data)
        for source in (self.train_data, self.validation_data):
            source.check_vocabulary(config.model.vocab_size)
        self.step = TrainStep(config, self.mesh, self.device)
        self.batches = BatchSchedule(config.train)
        if fresh:
            self._delete_run()
        self.progress = self._resume()

    def run(self) -> bool:
        """Trains to the configured number of steps.

        Returns:
            Whether the run is complete; False when it was asked to stop and wrote a checkpoint.
        """
        if self.progress.step >= self.config.train.steps:
            self._say(f"nothing to do: step {self.progress.step} of {self.config.train.steps} is done")
            return True
        with StopRequest() as stop, self._sinks() as sinks:
            complete = self._train(stop, sinks)
        if self.is_reporter:
            self._plot()
        return complete

    def _train(self, stop: StopRequest, sinks: Sinks) -> bool:
        train = self.config.train
        meter = Meter(self.config, self.mesh, self.device)
        while self.progress.step < train.steps:
            index = self.progress.step
            lr = learning_rate(self.config.optimizer, index, train.steps)
            bias_rate = 0.0 if self.config.balance.freeze_router else bias_update_rate(self.config.balance.bias, index)
            batch_size = self.batches.global_batch_size(self.progress.consumed_sequences)
            waited = time.perf_counter()
            batches = self._global_batch(self.train_data, self.progress.consumed_sequences, batch_size)
            data_seconds = time.perf_counter() - waited
            try:
                result = self.step.run(batches, lr, bias_rate, stop.requested)
            except NonFiniteError as error:
                raise UserError(f"training stopped at step {index + 1}: {error}") from error
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
            if _due(self.progress.step, train.checkpoint.every_steps) or done or stopping:
                self._save()
                meter.restart()
            if stopping:
                self._say(f"stopped as asked after step {self.progress.step}; the same command goes on from there")
                return False
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

    def _validate(self, sinks: Sinks) -> None:
        """Mean losses over the first sequences of the validation split, always the same ones."""
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
        lm, *mtp = (sums / targets.clamp(min=1)).tolist()
        bits_per_byte = lm / math.log(2) / self.validation_data.bytes_per_token
        sinks.write(ValidationRecord(self.progress.step, lm, tuple(mtp), bits_per_byte))

    def _save(self) -> Path:
        return save_load.save(self.config, self.progress, self.step.module, self.step.optimizer, self.mesh)

    def _resume(self) -> Progress:
        # One rank decides for all: others may see another state of a shared folder.
        newest: list[Path | None] = [next(reversed(list_checkpoints(self.config.train.output)), None)]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] is None:
            return Progress()
        progress = save_load.load(newest[0], self.step.module, self.step.optimizer, self.mesh)
        self._say(f"resuming from {newest[0]} (step {progress.step})")
        return progress

    def _delete_run(self) -> None:
        def delete() -> None:
            folder = self.config.train.output / "checkpoints"
            if folder.exists():
                shutil.rmtree(folder)
            (self.config.train.output / LOG_NAME).unlink(missing_ok=True)

        on_first_rank("the earlier run cannot be deleted", delete)

    def _sinks(self) -> Sinks:
        if not self.is_reporter:
            return Sinks([])
        return make_sinks(self.config, self.config.train.output, self.progress.step)

    def _plot(self) -> None:
        output = self.config.train.output
        lines = {"unigram entropy of the validation data": self.validation_data.unigram_entropy}
        plot_losses(output / LOG_NAME, output / "loss.png", lines)
        self._say(f"loss plot: {output / 'loss.png'}")

    def _say(self, text: str) -> None:
        if self.is_reporter:
            print(text, flush=True)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
