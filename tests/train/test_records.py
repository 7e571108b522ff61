"""Records, their JSON form, and the sinks that take them."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from steptron.config.schema import PretrainConfig
from steptron.config.stages import Stage
from steptron.errors import UserError
from steptron.train.console import ConsoleSink
from steptron.train.records import (
    EventRecord,
    Record,
    StepRecord,
    ValidationRecord,
    from_json,
    read_records,
    scalars,
    to_json,
)
from steptron.train.sinks import JsonlSink, Sinks, TensorBoardSink, WandbSink, cut_back, make_sinks
from tests.train.full_disk import no_file_beyond


def step_record(step: int, **changes: Any) -> StepRecord:
    record = StepRecord(
        step=step,
        consumed_sequences=8 * step,
        consumed_tokens=1000 * step,
        loss=5.5,
        lm_loss=5.0,
        mtp_losses=(5.75, 6.25),
        ep_loss=1.0625,
        learning_rate=1e-3,
        bias_update_rate=1e-3,
        grad_norm=0.5,
        batch_size=8,
        sequence_length=128,
        tokens_per_second=12345.0,
        step_seconds=0.25,
        data_seconds=0.0,
        model_tflops=0.125,
        mfu=None,
        max_violation=0.5,
        min_load=0.25,
        straggler_factor=1.25,
        routing_confidence=0.3,
        memory_bytes=2**30,
    )
    return dataclasses.replace(record, **changes)


def validation_record(step: int) -> ValidationRecord:
    return ValidationRecord(step=step, lm_loss=4.5, mtp_losses=(5.0, 5.5), bits_per_byte=2.0)


# ------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "record",
    [
        step_record(3),
        step_record(3, mtp_losses=(), mfu=0.31, ep_loss=None, max_violation=None, min_load=None, straggler_factor=None),
        validation_record(7),
        ValidationRecord(step=7, lm_loss=1 / 3, mtp_losses=()),
        EventRecord(7, "skipped", 'loss NaN, "quoted" µ\nand a second line'),
        EventRecord(0, "rolled back", "NaN"),
    ],
)
def test_json_keeps_every_figure(record: Record) -> None:
    line = to_json(record)
    assert "\n" not in line
    assert from_json(line) == record


def test_json_is_strict_where_figures_are_not_finite() -> None:
    line = to_json(step_record(3, loss=math.nan, grad_norm=math.inf, mtp_losses=(-math.inf, 1.0)))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(line, parse_constant=refuse)
    assert (content["loss"], content["grad_norm"], content["mtp_losses"]) == ("NaN", "Infinity", ["-Infinity", 1.0])
    assert math.isnan(float(content["loss"]))
    record = from_json(line)
    assert isinstance(record, StepRecord)
    assert math.isnan(record.loss)
    assert (record.grad_norm, record.mtp_losses) == (math.inf, (-math.inf, 1.0))


def test_scalars_name_depths_from_1_and_leave_out_what_is_unknown() -> None:
    figures = scalars(step_record(3))
    assert figures["train/mtp_loss_1"] == 5.75
    assert figures["train/mtp_loss_2"] == 6.25
    assert figures["train/loss"] == 5.5
    assert {"train/mfu", "train/step", "train/mtp_losses"}.isdisjoint(figures)
    assert scalars(validation_record(3)) == {
        "validation/lm_loss": 4.5,
        "validation/mtp_loss_1": 5.0,
        "validation/mtp_loss_2": 5.5,
        "validation/bits_per_byte": 2.0,
    }
    assert scalars(EventRecord(3, "skipped", "why")) == {}


# ------------------------------------------------------------------------------------ JSON lines


def write_all(path: Path, resume_step: int, records: list[Record]) -> None:
    sink = JsonlSink(path, resume_step)
    for record in records:
        sink.write(record)
    sink.close()


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def records(first: int, last: int) -> list[Record]:
        result: list[Record] = []
        for step in range(first, last + 1):
            result.append(step_record(step, loss=1 / step))
            if step % 3 == 0:
                result.append(validation_record(step))
        return result

    write_all(tmp_path / "whole", 0, records(1, 10))
    # Died after step 8; its newest checkpoint is that of step 6.
    write_all(tmp_path / "resumed", 0, records(1, 8))
    write_all(tmp_path / "resumed", 6, records(7, 10))
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert read_records(tmp_path / "resumed") == records(1, 10)


def test_events_are_cut_back_with_their_steps(tmp_path: Path) -> None:
    """What led to the place that a run goes on from stays."""
    events = [EventRecord(4, "rolled back", "from step 6"), EventRecord(5, "skipped", "a spike")]
    path = tmp_path / "log.jsonl"
    write_all(path, 0, [step_record(4), events[0], events[1], step_record(6)])
    write_all(path, 5, [step_record(6)])
    assert read_records(path) == [step_record(4), *events, step_record(6)]
    write_all(path, 4, [])
    assert read_records(path) == [step_record(4), events[0]]


def test_a_half_written_last_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(to_json(step_record(1)) + "\n" + to_json(step_record(2))[:40])
    assert read_records(path) == [step_record(1)]
    write_all(path, 5, [step_record(6)])
    assert read_records(path) == [step_record(1), step_record(6)]


def test_a_half_written_character_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(to_json(step_record(1)).encode() + b'\n{"kind": "\xc3')
    assert read_records(path) == [step_record(1)]
    write_all(path, 5, [step_record(6)])
    assert read_records(path) == [step_record(1), step_record(6)]


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(to_json(step_record(1)) + "\n" + to_json(step_record(2)))
    write_all(path, 2, [step_record(3)])
    assert [record.step for record in read_records(path)] == [1, 2, 3]


def test_a_new_run_does_not_mix_with_an_old_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_all(path, 0, [step_record(1), step_record(2)])
    write_all(path, 0, [step_record(1, loss=9.0)])
    assert read_records(path) == [step_record(1, loss=9.0)]


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path, 0)
    sink.write(step_record(1))
    assert read_records(path) == [step_record(1)]
    sink.close()
    sink.close()


@pytest.mark.parametrize("broken", ["not json", "[1]", '{"kind": "train"}', '{"step": "3"}'])
def test_a_broken_line_inside_a_log_is_named_and_left_alone(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "log.jsonl"
    content = to_json(step_record(1)) + "\n" + broken + "\n" + to_json(step_record(2)) + "\n"
    path.write_text(content)
    with pytest.raises(UserError, match=r"log\.jsonl:2: not a record"):
        JsonlSink(path, 5)
    with pytest.raises(UserError, match=r"log\.jsonl:2: not a record"):
        read_records(path)
    assert path.read_text() == content


def test_a_full_disk_ends_no_run_and_loses_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    with Sinks([JsonlSink(path, 0)]) as sinks:
        sinks.write(step_record(1))
        with no_file_beyond(path.stat().st_size + 100):
            for step in (2, 3):
                sinks.write(step_record(step))
            sinks.write(validation_record(3))
            assert read_records(path) == [step_record(1)]
            assert path.read_text().endswith("}\n")
        sinks.write(step_record(4))
    assert read_records(path) == [*map(step_record, (1, 2, 3)), validation_record(3), step_record(4)]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_records_that_are_lost_are_an_error_unless_there_is_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    lost = f"{path} cannot be written (File too large): 1 record is lost"
    with no_file_beyond(0), pytest.raises(UserError) as error, Sinks([JsonlSink(path, 0)]) as sinks:
        sinks.write(step_record(1))
    assert str(error.value) == lost
    assert lost not in capsys.readouterr().err
    with (
        no_file_beyond(0),
        pytest.raises(ZeroDivisionError, match="the reason"),
        Sinks([JsonlSink(path, 0)]) as sinks,
    ):
        sinks.write(step_record(1))
        raise ZeroDivisionError("the reason")
    assert f"warning: {lost}" in capsys.readouterr().err.splitlines()


def test_cutting_back_needs_no_space(tmp_path: Path) -> None:
    """A run that rolls back on a full disk."""
    path = tmp_path / "log.jsonl"
    write_all(path, 0, list(map(step_record, range(1, 10))))
    with path.open("a") as stream:
        stream.write('{"kind": "train", "st')
    with no_file_beyond(0):
        cut_back(path, 6)
    assert read_records(path) == list(map(step_record, range(1, 7)))
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_that_cannot_be_cut_back_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_all(path, 0, list(map(step_record, (1, 9, 2))))
    content = path.read_bytes()
    with no_file_beyond(100), pytest.raises(OSError, match="too large"):
        cut_back(path, 6)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]
    cut_back(path, 6)
    assert read_records(path) == list(map(step_record, (1, 2)))


# ---------------------------------------------------------------------------------------- console


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=80), text


def test_plain_lines_are_periodic_whole_and_include_first_and_last() -> None:
    console, text = plain_console()
    clock = Clock()
    sink = ConsoleSink(total_steps=100, total_sequences=800, console=console, line_seconds=10, clock=clock)
    for step in range(1, 101):
        clock.now += 3
        sink.write(step_record(step))
    sink.close()
    shown = [int(line.split()[1].split("/")[0]) for line in text.getvalue().splitlines()]
    # The first, every fourth (12 s are the first multiple of 3 s from 10 s on), and the last.
    assert shown == [*range(1, 98, 4), 100]
    assert "loss 5.5000  lm 5.0000  mtp 5.7500 6.2500  grad 0.5  lr 1.00e-03  12,345 tokens/s" in text.getvalue()


def test_a_run_that_stops_early_still_shows_its_last_step() -> None:
    console, text = plain_console()
    sink = ConsoleSink(total_steps=100, total_sequences=800, console=console, line_seconds=10, clock=Clock())
    for step in (1, 2, 3):
        sink.write(step_record(step))
    sink.close()
    sink.close()
    assert [line.split()[1] for line in text.getvalue().splitlines()] == ["1/100", "3/100"]


def test_time_left_counts_sequences_since_the_resume() -> None:
    console, text = plain_console()
    clock = Clock()
    sink = ConsoleSink(100, total_sequences=2000, done_steps=50, done_sequences=400, console=console, clock=clock)
    clock.now += 30
    # 8 · 55 = 440 consumed, 40 of them here in 30 s: 1,560 more take 1,170 s.
    sink.write(step_record(55, mfu=0.314))
    assert text.getvalue().rstrip().endswith("MFU 31.4 %  19:30 left")


def test_validations_are_always_shown() -> None:
    console, text = plain_console()
    sink = ConsoleSink(100, 800, console=console, clock=Clock())
    sink.write(step_record(1))
    sink.write(validation_record(1))
    sink.write(ValidationRecord(2, math.nan, ()))
    lines = text.getvalue().splitlines()
    assert lines[1] == "validation at step 1  lm 4.5000  mtp 5.0000 5.5000  2.000 bits per byte"
    assert lines[2] == "validation at step 2  lm nan"


def test_a_terminal_gets_a_bar_that_fits_80_columns() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    clock = Clock()
    sink = ConsoleSink(2000, 16_000, console=console, clock=clock)
    clock.now += 3700
    sink.write(step_record(1000))
    sink.write(validation_record(1000))
    sink.close()
    assert "━━━━━━━━━━           step 1000/2000  loss 5.5000  12,345 tokens/s  1:01:40 left" in text.getvalue()
    assert "validation at step 1000" in text.getvalue()


def test_output_that_goes_to_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        sink = ConsoleSink(100, 800, console=Console(file=out), line_seconds=0, clock=Clock())
        with no_file_beyond(0):
            sink.write(step_record(1))
            sink.write(validation_record(1))
        sink.write(step_record(2))
        sink.close()
    assert [line.split()[:2] for line in (tmp_path / "out").read_text().splitlines()] == [
        ["step", "1/100"],
        ["validation", "at"],
        ["step", "2/100"],
    ]


# ------------------------------------------------------------------------- TensorBoard and W&B


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, last, loss in ((0, 8, 1.0), (6, 10, 2.0)):
        sink = TensorBoardSink(tmp_path, resume_step)
        for step in range(resume_step + 1, last + 1):
            sink.write(step_record(step, loss=loss))
        sink.write(validation_record(last))
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    loss_events = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in loss_events] == [(s, 1.0) for s in range(1, 7)] + [
        (s, 2.0) for s in range(7, 11)
    ]
    assert [(event.step, event.value) for event in events.Scalars("validation/lm_loss")] == [(10, 4.5)]
    assert events.Scalars("train/mtp_loss_2")[0].value == 6.25


def test_tensorboard_outlives_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half an event in a file would hide all that follow."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, 0)
    sink.write(step_record(1))
    (path,) = tmp_path.iterdir()
    with no_file_beyond(path.stat().st_size + 100):
        for step in range(2, 30):  # more than TensorBoard's own writer keeps
            sink.write(step_record(step))
    sink.write(step_record(30))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 31))
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_what_tensorboard_lacks_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = TensorBoardSink(tmp_path, 0)
    with no_file_beyond(0):
        sink.write(step_record(1))
        sink.close()
        sink.close()
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {path} cannot be written (File too large): records are kept until it can be",
        f"warning: for TensorBoard only: {path} cannot be written (File too large): 1 record is lost",
    ]


def test_sessions_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    """As after a roll-back."""
    for _ in range(3):
        TensorBoardSink(tmp_path, 0).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_missing_tensorboard_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(UserError, match=r"pip install tensorboard.*train.logging.tensorboard=false"):
        TensorBoardSink(tmp_path, 0)


def test_missing_wandb_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"train\.logging\.wandb_project needs the package wandb: `pip install wandb`"):
        WandbSink("project", tmp_path, {})


class FakeWandb:
    """Stands for the wandb module: keeps what it is called with."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> SimpleNamespace:
        self.inits.append(arguments)
        return SimpleNamespace(define_metric=self._define, log=self.logged.append, finish=self._finish)

    def _define(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def _finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (1, 2):
        sink = WandbSink("steptron", tmp_path / "run", {"train": {"steps": 10}})
        sink.write(step_record(step))
        sink.close()
    first, second = wandb.inits
    assert first == second
    assert (first["project"], first["resume"], first["config"]) == ("steptron", "allow", {"train": {"steps": 10}})
    assert wandb.metrics[:2] == [("step", None), ("*", "step")]
    assert [entry["step"] for entry in wandb.logged] == [1, 2]
    assert wandb.logged[0]["train/mtp_loss_1"] == 5.75
    assert wandb.finished == 2
    other = WandbSink("steptron", tmp_path / "other", {})
    other.close()
    assert wandb.inits[2]["id"] != first["id"]


@pytest.mark.parametrize("fault", [BrokenPipeError("no service"), RuntimeError("no service")])
def test_wandb_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink("steptron", tmp_path, {})
    sink.write(step_record(1))

    def fail(figures: dict[str, float]) -> None:
        raise fault

    sink._run.log = fail
    sink.write(step_record(2))
    sink.write(step_record(3))
    sink.close()
    assert wandb.finished == 0
    assert capsys.readouterr().err.splitlines() == [
        f"warning: Weights & Biases gets nothing more: {type(fault).__name__}: no service; log.jsonl goes on"
    ]


def test_a_wandb_id_that_could_not_be_written_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb_run_id").touch()
    WandbSink("steptron", tmp_path, {})
    assert wandb.inits[0]["id"] == (tmp_path / "wandb_run_id").read_text().strip() != ""


# ------------------------------------------------------------------------------------- make_sinks


def pretrain_config(output: Path, **logging: Any) -> PretrainConfig:
    attention = dict(num_heads=4, num_kv_groups=2, rope=dict(theta=1e4))
    return PretrainConfig.model_validate(
        dict(
            model=dict(
                vocab_size=128,
                hidden_size=64,
                num_layers=2,
                num_dense_layers=1,
                head_dim=16,
                dense_hidden_size=96,
                full=attention,
                sliding=attention | dict(window=6),
                moe=dict(num_experts=8, top_k=2, expert_hidden_size=32, shared_hidden_size=32),
            ),
            data=dict(train=[dict(path="data")], sequence_length=128),
            optimizer=dict(lr=1e-3),
            train=dict(
                output=str(output),
                steps=10,
                global_batch_size=8,
                micro_batch_size=2,
                batch_ramp=dict(start=4, increment=4, sequences=16),
                logging=logging,
            ),
        )
    )


def test_make_sinks_opens_what_the_configuration_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = pretrain_config(tmp_path, tensorboard=True, wandb_project="steptron")
    with make_sinks(Stage(config), resume_step=0) as sinks:
        sinks.write(step_record(10))
    assert read_records(tmp_path / "log.jsonl") == [step_record(10)]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert wandb.inits[0]["config"] == config.model_dump(mode="json")
    assert wandb.finished == 1
    assert capsys.readouterr().out.startswith("step 10/10")


def test_make_sinks_leaves_out_what_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with make_sinks(Stage(pretrain_config(tmp_path, tensorboard=False)), resume_step=0) as sinks:
        sinks.write(step_record(1))
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("logging", [dict(tensorboard=True), dict(tensorboard=False, wandb_project="p")])
def test_a_missing_package_stops_before_the_log_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    write_all(tmp_path / "log.jsonl", 0, [step_record(1), step_record(2)])
    with pytest.raises(UserError, match="pip install"):
        make_sinks(Stage(pretrain_config(tmp_path, **logging)), resume_step=1)
    assert len(read_records(tmp_path / "log.jsonl")) == 2


def test_one_failing_sink_does_not_keep_the_others_open() -> None:
    closed = []

    class Failing:
        def write(self, record: Record) -> None:
            pass

        def close(self) -> None:
            raise OSError("disk full")

    class Closing:
        def write(self, record: Record) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(OSError, match="disk full"):
        Sinks([Failing(), Closing()]).close()
    assert closed == [True]
