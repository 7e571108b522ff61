from __future__ import annotations

import pytest

from steptron.errors import UserError
from steptron.profiling.request import ProfileRequest, Window, parse_request


@pytest.mark.parametrize(
    ("text", "windows", "folders"),
    [
        ("20", [(20, 20)], ["step-20"]),
        ("20-22", [(20, 22)], ["steps-20-22"]),
        ("100, 20 - 22", [(20, 22), (100, 100)], ["steps-20-22", "step-100"]),
        ("1,2", [(1, 1), (2, 2)], ["step-1", "step-2"]),
    ],
)
def test_windows(text: str, windows: list[tuple[int, int]], folders: list[str]) -> None:
    request = parse_request(text, None, total_steps=100, world_size=1)
    assert [(w.first, w.last) for w in request.windows] == windows
    assert [w.folder_name for w in request.windows] == folders
    assert request.ranks == (0,)


def test_ranks() -> None:
    assert parse_request("1", "8,0-2", 1, world_size=9).ranks == (0, 1, 2, 8)


@pytest.mark.parametrize(
    ("steps", "ranks", "message"),
    [
        ("", None, "--profile '': '' is neither a number nor a range; write 20, 20-22 or 20-22,100"),
        ("a", None, "'a' is neither"),
        ("-3", None, "'-3' is neither"),
        ("3,", None, "'' is neither"),
        ("1.5", None, "'1.5' is neither"),
        ("٣", None, "'٣' is neither"),
        ("5-3", None, "5-3 ends before it begins"),
        ("1-3,3", None, "3 is named twice"),
        ("0", None, "steps are counted from 1"),
        ("9-11", None, "the run ends with step 10 (train.steps)"),
        ("1", "x", "--profile-ranks 'x': 'x' is neither a number nor a range; write 0, 0,8 or 0-7"),
        ("1", "0-4", "--profile-ranks 0-4: the run has 4 processes, the last of them is rank 3"),
    ],
)
def test_refusals(steps: str, ranks: str | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_request(steps, ranks, total_steps=10, world_size=4)
    assert message in str(caught.value) and "--profile" in str(caught.value)


def test_a_resumed_run_profiles_what_is_left() -> None:
    request = ProfileRequest((Window(2, 3), Window(5, 8), Window(10, 10)), (0, 4))
    left, notes = request.after(5)
    assert left == ProfileRequest((Window(6, 8), Window(10, 10)), (0, 4))
    assert [note.partition(" already")[0] for note in notes] == ["--profile: steps 2-3 are", "--profile: step 5 is"]
    assert request.after(0) == (request, [])
    assert request.after(10)[0].windows == ()
