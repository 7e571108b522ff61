"""Turns what steps did into records: rates, loads, memory."""

from __future__ import annotations

import resource
import time

import torch
import torch.distributed as dist

from steptron.checkpoint.manifest import Progress
from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import model_spec
from steptron.parallel.mesh import Mesh
from steptron.planning.flops import training_flops_per_token
from steptron.planning.peaks import bf16_peak_tflops
from steptron.train.records import StepRecord
from steptron.train.step import StepResult


class Meter:
    """Times the loop between two records.

    Rates are means since the previous record. MFU uses the routing as it was: the number of
    selected experts is fixed, so the model FLOPs do not depend on it, and the time does.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, device: torch.device) -> None:
        self._config = config
        self._mesh = mesh
        self._device = device
        self._flops_per_token = training_flops_per_token(
            model_spec(config.model), config.data.sequence_length, config.loss.mtp_train_depths
        ).total
        known = bf16_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_tflops = config.train.peak_tflops or known
        self.restart()

    def restart(self) -> None:
        """Starts a new interval; called after work that is not training (validation, checkpoints)."""
        self._start = time.perf_counter()
        self._steps = self._tokens = 0
        self._data_seconds = 0.0

    def count(self, result: StepResult, data_seconds: float) -> None:
        """Adds a step to the interval."""
        self._steps += 1
        self._tokens += result.observed.counts.valid
        self._data_seconds += data_seconds

    def record(
        self, progress: Progress, result: StepResult, batch_size: int, lr: float, bias_rate: float
    ) -> StepRecord:
        """The record of the latest step; ends the interval. Called on every rank."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = self._tokens / seconds
        tflops = rate * self._flops_per_token / dist.get_world_size() / 1e12
        observed = result.observed
        violation, min_load, straggler = self._loads(observed.tokens_per_expert_LE)
        record = StepRecord(
            step=progress.step,
            consumed_sequences=progress.consumed_sequences,
            consumed_tokens=progress.consumed_tokens,
            loss=observed.losses.total,
            lm_loss=observed.losses.lm,
            mtp_losses=observed.losses.mtp,
            ep_loss=observed.losses.ep,
            learning_rate=lr,
            bias_update_rate=bias_rate,
            grad_norm=result.gradient_norm,
            batch_size=batch_size,
            sequence_length=self._config.data.sequence_length,
            tokens_per_second=rate,
            step_seconds=seconds / self._steps,
            data_seconds=self._data_seconds / self._steps,
            model_tflops=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
            max_violation=violation,
            min_load=min_load,
            straggler_factor=straggler,
            routing_confidence=observed.confidence,
            memory_bytes=self._peak_memory(),
        )
        self.restart()
        return record

    def _loads(self, tokens_LE: torch.Tensor) -> tuple[float | None, float | None, float | None]:
        if tokens_LE.numel() == 0:
            return None, None, None
        load_LE = tokens_LE.double() / tokens_LE.double().mean(dim=1, keepdim=True).clamp(min=1e-9)
        load_LG = load_LE.view(load_LE.shape[0], self._mesh.expert_size, -1).mean(dim=2)
        violation = load_LE.max(dim=1).values.mean() - 1
        return float(violation), float(load_LE.min()), float(load_LG.max())

    def _peak_memory(self) -> int:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        largest = torch.tensor(peak, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)
