"""`steptron model logits`, `trace` and `trace-diff`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from steptron.cli.main import app

REPOSITORY = Path(__file__).parents[2]
CASE = REPOSITORY / "tests" / "data" / "step3p5" / "tiny"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", right()["input_ids"])


def right() -> dict[str, np.ndarray]:
    with np.load(CASE / "expected.npz") as arrays:
        return dict(arrays)


def model(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["model", command, *map(str, arguments)])


def model_process(command: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steptron", "model", command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_logits_of_two_processes() -> None:
    Path("out.npz").write_text("an older file")
    layout = ["parallel.tensor=2", "parallel.expert=2", "--nproc", "2"]
    model_process("logits", CASE, *layout, "--input-ids", "ids.npy", "--out", "out.npz")
    with np.load("out.npz") as result:
        assert set(result) == {"logits", "mtp_logits"}
        for name in result:
            assert result[name].dtype == np.float32
            assert np.abs(result[name] - right()[name]).max() <= 1e-4
    assert sorted(path.name for path in Path().iterdir()) == ["ids.npy", "out.npz"]


def test_traces_of_both_implementations_and_their_difference() -> None:
    options = ["--input-ids", "ids.npy", "--only", "layers.*", "--only", "logits"]
    model_process("trace", CASE, *options, "--out", "ours.npz", "model.clamp.position=before_silu")
    result = model("trace", CASE, *options, "--out", "theirs.npz", "--implementation", "transformers")
    assert result.exit_code == 0, result.output
    equal = model("trace-diff", "theirs.npz", "theirs.npz")
    assert equal.exit_code == 0 and "equal within the tolerance at 70 sites" in equal.output
    parted = model("trace-diff", "theirs.npz", "ours.npz")
    assert parted.exit_code == 1
    assert "parted first at layers.7.ffn.output: max abs" in parted.output
    assert "0 of 80" in parted.output
    assert "parted first at layers.7" not in model("trace-diff", "theirs.npz", "ours.npz", "--tolerance", "0.5").output


def saved(array: object) -> str:
    np.save("bad.npy", np.asarray(array))
    return "bad.npy"


def text_file() -> str:
    Path("bad.npy").write_text("not an array")
    return "bad.npy"


BAD_IDS = {
    "missing": (lambda: "absent.npy", "absent.npy: there is no such file"),
    "text": (text_file, "cannot be read as an .npy file"),
    "pickled": (lambda: saved([[object()]]), "cannot be read as an .npy file"),
    "float": (lambda: saved([[1.0]]), "holds float64 [1, 1]: expected whole numbers [batch, seq]"),
    "bool": (lambda: saved([[True]]), "holds bool [1, 1]: expected whole numbers"),
    "one row without batch": (lambda: saved([1, 2]), "holds int64 [2]: expected whole numbers [batch, seq]"),
    "empty": (lambda: saved(np.zeros((2, 0), np.int64)), "at least one sequence of at least one token"),
    "too large": (lambda: saved([[0, 128], [-1, 5]]), "2 of 4 ids are outside the vocabulary, which has 0 to 127: the "
                  "first is 128 in row 0 at place 1"),
    "unsigned": (lambda: saved(np.array([[2**64 - 1]], np.uint64)), "18446744073709551615, which is no int64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_IDS)
def test_bad_ids(kind: str) -> None:
    make, text = BAD_IDS[kind]
    result = model("logits", CASE, "--input-ids", make(), "--out", "out.npz")
    assert result.exit_code == 2 and text in result.output.replace("\n", " "), result.output
    assert not Path("out.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ["--out", "absent/out.npz", "--input-ids", "absent.npy", "--replay-routing", "absent.npz"],
            ["3 problems", "there is no folder absent", "absent.npy: there", "--replay-routing absent.npz: there"],
        ),
        (["--out", "."], ["--out . is a folder"]),
        (["--out", "out.npz", "train.steps=3"], ["train is not a known key", "model, parallel"]),
        (["--out", "out.npz", "parallel.pipeline=2"], ["multiple of parallel.pipeline x tensor x context"]),
        (
            ["--out", "out.npz", "parallel.tensor=4", "--nproc", "4"],
            ["model.full.num_kv_groups (2) must be a multiple of parallel.tensor (4)"],
        ),
        (["--out", "out.npz", "parallel.context=9999999999"], ["1 problem", "(1) must be a multiple"]),
        (["--out", "out.npz", "parallel.node_size=1"], ["parallel.node_size is 1", "leave it out"]),
        (["--out", "out.npz", "--replay-routing", "ids.npy"], ["ids.npy is no .npz file"]),
    ],
)
def test_bad_arguments(arguments: list[str], texts: list[str]) -> None:
    result = model("logits", CASE, "--input-ids", "ids.npy", *arguments)
    assert result.exit_code == 2
    for text in texts:
        assert text in result.output, result.output


def test_bad_weights_and_sites() -> None:
    result = model("logits", ".", "--input-ids", "ids.npy", "--out", "out.npz")
    assert result.exit_code == 2 and "holds no weights" in result.output
    result = model("trace", CASE, "--input-ids", "ids.npy", "--out", "out.npz", "--only", "layer.3.*")
    assert result.exit_code == 2 and "layer.3.* names no site of this model" in result.output


def test_transformers_in_one_process_only() -> None:
    options = ["--input-ids", "ids.npy", "--out", "out.npz", "--implementation", "transformers"]
    result = model("trace", CASE, *options, "--nproc", "2", "parallel.tensor=2", "model.sliding.window=7")
    assert result.exit_code == 2 and "leave out --nproc 2, parallel.tensor=2" in result.output


def test_bad_traces() -> None:
    result = model("trace-diff", "ids.npy", "absent.npz")
    assert result.exit_code == 2 and "ids.npy is no .npz file" in result.output
    assert model("trace-diff", "a.npz", "b.npz", "--tolerance", "-1").exit_code == 2


def test_what_is_read_or_no_file_is_not_replaced(tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.zeros((1, 4), np.int64))
    before = ids.read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, problem in ((ids, "is one of the files that are read"), (pipe, "is no file that can be replaced")):
        result = model("logits", CASE, "--input-ids", ids, "--out", out)
        assert result.exit_code == 2 and problem in result.output
    assert ids.read_bytes() == before and pipe.is_fifo()
