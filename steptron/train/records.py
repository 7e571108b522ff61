"""What a run reports: one record per logged step or validation, and its form as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from steptron.errors import UserError


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all processes.

    Attributes:
        step: optimizer steps completed, this one included (the first record of a run has 1).
        consumed_sequences: sequences consumed so far, this step included.
        consumed_tokens: tokens consumed so far, padding not counted.
        loss: the loss that was differentiated, nats.
        lm_loss: cross entropy of the main head, nats per counted token.
        mtp_losses: unweighted cross entropy of each MTP depth in training, nearest first, nats per counted token.
        ep_loss: EP-group balance loss before its coefficient, mean over MoE layers (1 at balance); None without
            MoE layers.
        learning_rate: rate this step used.
        bias_update_rate: rate u of the selection-bias update after this step.
        grad_norm: global gradient norm before clipping.
        batch_size: sequences of this step.
        sequence_length: tokens per sequence.
        tokens_per_second: tokens without padding, all devices together, mean since the previous record.
        step_seconds: wall time per step, mean since the previous record.
        data_seconds: of that, waiting for data.
        model_tflops: model TFLOP/s per device (recomputation excluded), mean since the previous record.
        mfu: ``model_tflops`` over the device's peak; None where the peak is unknown.
        max_violation: busiest expert's tokens over the mean, minus 1, mean over MoE layers (MaxVio of
            Wang et al. 2024, arXiv 2408.15664); None without MoE layers.
        min_load: least busy expert's tokens over the mean, smallest over MoE layers; None without MoE layers.
        straggler_factor: busiest expert-parallel group's tokens over the mean, largest over MoE layers;
            None without MoE layers.
        routing_confidence: share of router probability on the selected experts, mean over tokens and MoE layers;
            None without MoE layers.
        memory_bytes: peak memory of the process or device that used most.
    """

    kind: ClassVar[str] = "train"

    step: int
    consumed_sequences: int
    consumed_tokens: int
    loss: float
    lm_loss: float
    mtp_losses: tuple[float, ...]
    ep_loss: float | None
    learning_rate: float
    bias_update_rate: float
    grad_norm: float
    batch_size: int
    sequence_length: int
    tokens_per_second: float
    step_seconds: float
    data_seconds: float
    model_tflops: float
    mfu: float | None
    max_violation: float | None
    min_load: float | None
    straggler_factor: float | None
    routing_confidence: float | None
    memory_bytes: int


@dataclass(frozen=True)
class ValidationRecord:
    """One validation.

    Attributes:
        step: optimizer steps completed.
        lm_loss: cross entropy of the main head, nats per counted token.
        mtp_losses: cross entropy of each MTP depth in training, nearest first, nats per counted token.
        bits_per_byte: ``lm_loss`` in bits per byte of text; None where the bytes are unknown.
        domains: of several datasets, the cross entropy of the main head on each, by name.
    """

    kind: ClassVar[str] = "validation"

    step: int
    lm_loss: float
    mtp_losses: tuple[float, ...]
    bits_per_byte: float | None = None
    domains: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """Something that happened to a run beside its steps.

    Attributes:
        step: optimizer steps completed, those without an update counted.
        event: what: "skipped" (a batch, without an update), "rolled back" (to a checkpoint).
        detail: why, in words.
    """

    kind: ClassVar[str] = "event"

    step: int
    event: str
    detail: str


Record = StepRecord | ValidationRecord | EventRecord

_RECORDS: dict[str, type[StepRecord] | type[ValidationRecord] | type[EventRecord]] = {
    record.kind: record for record in (StepRecord, ValidationRecord, EventRecord)
}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def scalars(record: Record) -> dict[str, float]:
    """The record's figures by name, for plots of single values: ``train/loss``, ``train/mtp_loss_1``, …

    Figures that are None are left out, and so is the step, the axis of all of them; an event has none.
    """
    figures: dict[str, float] = {}
    if isinstance(record, EventRecord):
        return figures
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "step" or value is None:
            continue
        if isinstance(value, tuple):
            singular = field.name.removesuffix("es")
            figures |= {f"{record.kind}/{singular}_{depth}": item for depth, item in enumerate(value, start=1)}
        elif isinstance(value, Mapping):
            figures |= {f"{record.kind}/{field.name}/{name}": item for name, item in value.items()}
        else:
            figures[f"{record.kind}/{field.name}"] = value
    return figures


def to_json(record: Record) -> str:
    """One line of strict JSON, without the newline; figures that are not finite become the strings
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's and JavaScript's number conversions read."""
    content = {"kind": record.kind} | {
        field.name: jsonable(getattr(record, field.name)) for field in dataclasses.fields(record)
    }
    return json.dumps(content, allow_nan=False)


def from_json(line: str) -> Record:
    """Reads a line written by ``to_json``.

    Raises:
        ValueError: the line is no JSON object or no record of a known kind with exactly its fields; those that earlier
            versions did not write may be missing.
    """
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, not {type(content).__name__}")
    record = _RECORDS.get(content.pop("kind", None))
    if record is None:
        raise ValueError(f'expected a "kind" of {", ".join(_RECORDS)}')
    expected = {field.name for field in dataclasses.fields(record)}
    needed = {field.name for field in dataclasses.fields(record) if field.default_factory is dataclasses.MISSING}
    if not needed <= content.keys() <= expected:
        raise ValueError(
            f"fields of a {record.kind} record: missing {sorted(needed - content.keys())}, "
            f"unknown {sorted(content.keys() - expected)}"
        )
    if record is EventRecord:
        return EventRecord(**content)
    return record(**{name: _from_jsonable(value) for name, value in content.items()})


def read_records(path: Path) -> list[Record]:
    """Every record of a log, in file order. A last line without its newline is one that is being
    written, or was when the run died: it is left out.

    Raises:
        UserError: another line cannot be read; the message names file and line.
        FileNotFoundError: there is no such file.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(from_json(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a record of a run: {error}") from error
    return records


def jsonable(value: Any) -> Any:
    """A figure, or figures, for strict JSON: what is not finite as text."""
    if isinstance(value, tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_jsonable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_jsonable(item) for item in value)
    if isinstance(value, dict):
        return {name: _from_jsonable(item) for name, item in value.items()}
    if isinstance(value, str):
        return _NON_FINITE[value] if value in _NON_FINITE else _refuse(value)
    return value


def _refuse(value: str) -> float:
    raise ValueError(f"expected a number, NaN, Infinity or -Infinity, not {value!r}")
