"""Which checkpoints stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.checkpoint.folder import MANIFEST, delete, list_checkpoints, partial_folders
from steptron.checkpoint.retention import Kept, doomed, prune, superfluous
from steptron.config.schema import CheckpointConfig
from tests.checkpoint.made import flip, make

_LOSSES = st.none() | st.sampled_from([1.0, 1.5, 2.0]) | st.floats(0.0, 10.0)
_RUNS = st.dictionaries(st.integers(1, 60), _LOSSES, max_size=14)


@settings(max_examples=150, deadline=None)
@given(_RUNS, st.integers(1, 5), st.none() | st.integers(1, 20), st.integers(0, 4), st.randoms())
def test_the_rule(losses: dict[int, float | None], keep: int, every: int | None, best: int, order: object) -> None:
    """By counting, for each checkpoint, how many come before it: no sorting as in the implementation."""
    rule = CheckpointConfig(keep=keep, keep_every_steps=every, keep_best=best)
    checkpoints = [Kept(step, loss) for step, loss in losses.items()]
    order.shuffle(checkpoints)  # type: ignore[attr-defined]

    def is_better(other: int, step: int) -> bool:
        mine, theirs = losses[step], losses[other]
        assert mine is not None
        return theirs is not None and (theirs < mine or (theirs == mine and other > step))

    def stays(step: int) -> bool:
        newer = sum(other > step for other in losses)
        better = best if losses[step] is None else sum(is_better(other, step) for other in losses)
        return newer < keep or better < best or (every is not None and step % every == 0)

    assert superfluous(checkpoints, rule) == sorted(step for step in losses if not stays(step))


def test_the_rule_on_a_run(tmp_path: Path) -> None:
    for step, loss in ((10, 5.0), (20, 3.0), (30, None), (40, 3.0), (50, 4.0), (60, 9.0)):
        make(tmp_path, step, loss)
    rule = CheckpointConfig(keep=1, keep_every_steps=30, keep_best=1)
    before = list_checkpoints(tmp_path)
    leaving = doomed(tmp_path, rule)
    assert [folder.name for folder in leaving] == ["step_00000010", "step_00000020", "step_00000050"]
    assert list_checkpoints(tmp_path) == before
    prune(tmp_path, rule)
    assert list_checkpoints(tmp_path) == [folder for folder in before if folder not in leaving]
    assert doomed(tmp_path, rule) == []
    assert partial_folders(tmp_path / "checkpoints") == []


def test_damaged_ones_do_not_count_and_go_when_a_later_one_stays(tmp_path: Path) -> None:
    """Known to be damaged: 30 and 60, the newest. 20 has lost its manifest, 40's cannot be read."""
    folders = {step: make(tmp_path, step, loss=60.0 - step) for step in (10, 20, 30, 40, 50, 60)}
    (folders[20] / MANIFEST).unlink()
    flip(folders[40] / MANIFEST, 40)
    damaged = {folders[30], folders[60]}

    def leaving(keep: int, best: int = 0) -> list[int]:
        rule = CheckpointConfig(keep=keep, keep_best=best)
        return [step for step, folder in folders.items() if folder in doomed(tmp_path, rule, damaged)]

    assert leaving(1) == [10, 20, 30, 40]
    assert leaving(2) == leaving(1, best=2) == [20, 30, 40]
    prune(tmp_path, CheckpointConfig(keep=1), damaged)
    assert list_checkpoints(tmp_path) == [folders[50], folders[60]]
    # Without any whole one nothing goes.
    assert doomed(tmp_path, CheckpointConfig(keep=1), {folders[50], folders[60]}) == []


def test_a_deletion_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = make(tmp_path, 1), make(tmp_path, 2)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (path / "__0_0.distcp").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete(folder)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == [other]
    (left,) = partial_folders(tmp_path / "checkpoints")
    assert not (left / "__0_0.distcp").exists() and (left / MANIFEST).exists()
    # The same step again, and its deletion: what is left from before is no obstacle.
    delete(make(tmp_path, 1))
    assert list_checkpoints(tmp_path) == [other] and partial_folders(tmp_path / "checkpoints") == []


def test_of_a_linked_checkpoint_the_link_is_deleted(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "other", 1)
    make(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints" / "step_00000001").symlink_to(elsewhere)
    prune(tmp_path / "run", CheckpointConfig(keep=1))
    assert (elsewhere / MANIFEST).exists() and len(list_checkpoints(tmp_path / "run")) == 1
    assert partial_folders(tmp_path / "run" / "checkpoints") == []


def test_what_a_link_that_stays_points_to_stays(tmp_path: Path) -> None:
    old, target = make(tmp_path, 1), make(tmp_path, 2)
    link = make(tmp_path, 3)
    shutil.rmtree(link)
    link.symlink_to(target.name)
    prune(tmp_path, CheckpointConfig(keep=1))
    assert list_checkpoints(tmp_path) == [target, link] and not old.exists()


def test_what_alerts_ask_for_stays_out_of_the_rotation_with_the_one_before_it() -> None:
    rule = CheckpointConfig(keep=2, keep_requested=2)
    asked = {13, 27, 34}
    steps = [10, 13, 20, 27, 30, 34, 40, 50, 60]
    left = superfluous([Kept(step, requested=step in asked) for step in steps], rule)
    # 50 and 60 by number; 27 after 20 and 34 after 30 for alerts; 13 and what came before it are beyond the two newest.
    assert left == [10, 13, 40]
    assert superfluous(
        [Kept(step, requested=step in asked) for step in steps], CheckpointConfig(keep=2, keep_requested=0)
    ) == [
        10,
        13,
        20,
        27,
        30,
        34,
        40,
    ]
    assert superfluous([Kept(10), Kept(13, requested=True)], CheckpointConfig(keep=1, keep_requested=0)) == []
