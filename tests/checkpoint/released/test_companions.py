"""The files beside the tensors: kept and given back byte for byte, written for a run, taken from elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from steptron.checkpoint.checksums import file_sums
from steptron.checkpoint.manifest import read_manifest, write_manifest
from steptron.data.tokenizer import Tokenizer, train_tokenizer
from tests.checkpoint.released.transfers import CASE, do_export, do_import, failure, load_and_save
from tests.worker_pool import WorkerPool

FILES = {
    # Odd spacing and order: what is parsed and written again would differ.
    "generation_config.json": b'{ "eos_token_id":[1,2,7],"do_sample" : true }',
    "special_tokens_map.json": b'{"eos_token":  "<|endoftext|>"}\n\n',
    "chat_template.jinja": "{% for m in messages %}…{% endfor %}".encode(),
    "configuration_step3p5.py": b"class Step3p5Config:\r\n    pass\r\n",
    "modeling_step3p5.py": b"# remote code",
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["some text to train on " * 20], 280)


@pytest.fixture(scope="module")
def released(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(CASE / name, folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    tokenizer.save(folder)
    (folder / "README.md").write_text("not a companion")
    return folder


@pytest.fixture(scope="module")
def imported(pool: WorkerPool, released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    pool.run(1, do_import, released, folder)
    return folder


def companions(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" not in path.name}


def test_an_import_keeps_them_and_generate_finds_the_tokenizer(imported: Path, tokenizer: Tokenizer) -> None:
    assert Tokenizer.load(imported).hash == tokenizer.hash
    assert not (imported / "config.json").exists()  # else the checkpoint would pass for a released folder


def test_they_come_back_byte_for_byte(pool: WorkerPool, imported: Path, released: Path, tmp_path: Path) -> None:
    pool.run(1, do_export, imported, tmp_path / "out")
    expected = companions(released)
    del expected["README.md"]
    assert len(expected) == 10
    assert companions(tmp_path / "out") == expected


@pytest.fixture(scope="module")
def run(pool: WorkerPool, imported: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a run whose data has a tokenizer."""
    output = tmp_path_factory.mktemp("run")
    tokenizer.save(output / "data")
    pool.run(1, load_and_save, imported, output, [])
    return output / "checkpoints" / "step_00000000"


def test_those_of_a_run(pool: WorkerPool, run: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pool.run(1, do_export, run, tmp_path / "out")
    out = companions(tmp_path / "out")
    assert sorted(out) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert out["tokenizer.json"] == tokenizer.file_bytes
    config = json.loads(out["config.json"])
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, tokenizer.eod_id)
    assert json.loads(out["generation_config.json"]) == {"eos_token_id": tokenizer.eod_id}


def test_a_tokenizer_that_begins_texts(pool: WorkerPool, run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(run, checkpoint)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    begin = json.loads((checkpoint / "tokenizer.json").read_text())["added_tokens"][1]
    settings["bos_token"] = {"content": begin["content"], "__type": "AddedToken"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    manifest = read_manifest(checkpoint)
    sums = manifest.files | file_sums(checkpoint, ["tokenizer_config.json"])
    write_manifest(checkpoint, manifest.model_copy(update={"files": sums}))
    pool.run(1, do_export, checkpoint, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": begin["id"], "eos_token_id": 0} and begin["id"] != 0


@pytest.mark.parametrize("kind", ["released folder", "imported checkpoint"])
def test_those_of_another_folder(
    pool: WorkerPool, run: Path, released: Path, imported: Path, tmp_path: Path, kind: str
) -> None:
    source = released if kind == "released folder" else imported
    pool.run(1, do_export, run, tmp_path / "out", 10**9, "bf16", source)
    out, expected = companions(tmp_path / "out"), companions(released)
    config, original = json.loads(out.pop("config.json")), json.loads(expected.pop("config.json"))
    del expected["README.md"]
    assert out == expected
    assert config == original | {"torch_dtype": "bfloat16"}


def test_a_tokenizer_of_another_kind_of_model(pool: WorkerPool, run: Path, released: Path, tmp_path: Path) -> None:
    """Its tokenizer files are taken, its config.json is not."""
    other = tmp_path / "other"
    shutil.copytree(released, other)
    (other / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 7, "eos_token_id": 5}')
    pool.run(1, do_export, run, tmp_path / "out", 10**9, None, other)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "step3p5" and config["max_position_embeddings"] == 128
    assert config["eos_token_id"] == 0
    assert (tmp_path / "out" / "merges.txt").read_bytes() == FILES["merges.txt"]


def test_a_folder_without_any_is_refused(pool: WorkerPool, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        (message,) = pool.run(1, failure, do_export, run, tmp_path / "out", 10**9, None, folder)
        assert message == f"{folder} has neither config.json nor a tokenizer: name a released folder"
