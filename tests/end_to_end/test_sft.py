"""`steptron sft FILE`: what it trains, what it refuses, and losses domain by domain."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from steptron.config.loader import load
from steptron.data.chat.build import ChatBuildOptions, build_chat_dataset
from steptron.data.dataset import TokenDataset
from steptron.data.packing import pack
from steptron.train.records import EventRecord, StepRecord, ValidationRecord, read_records
from tests.data.chat.samples import chat, says, user
from tests.data.corpora import build_small, save_tokenizer, varied_texts, write_jsonl
from tests.end_to_end.runs import REPOSITORY, pretrain_arguments, steptron

STAGES = """
base: {root}/configs/model/nano.yaml
balance: {{freeze_router: true}}
data:
  train: [{{path: {folder}/greetings}}, {{path: {folder}/sums, weight: 3}}]
  validation: [{{path: {folder}/greetings}}, {{path: {folder}/sums}}]
  sequence_length: 64
  packing: best_fit
optimizer: {{lr: 1e-3}}
train:
  output: {folder}/sft
  initial_weights: {folder}/base
  global_batch_size: 4
  micro_batch_size: 1
  validation: {{batches: 1000}}
  logging: {{tensorboard: false}}
stages:
  - {{name: broad, tokens: 1_000}}
  - {{name: dense, epochs: 2, data: {{train: [{{path: {folder}/sums}}]}}}}
"""


def conversations(folder: Path, name: str, records: list[dict[str, object]], template: str = "step3p5") -> Path:
    source = write_jsonl(folder / f"{name}.jsonl", records)
    build_chat_dataset(
        ChatBuildOptions([source], folder / name, folder / "tokenizer", template, workers=1, validation_fraction=0.3)
    )
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of conversations, texts, and a model that two steps on the texts have trained."""
    folder = tmp_path_factory.mktemp("sft")
    save_tokenizer(folder / "tokenizer")
    conversations(folder, "greetings", [chat(user(f"I am {n}."), says(f"Hello {n}!")) for n in range(40)])
    conversations(folder, "sums", [chat(user(f"{n} + 1?"), says(str(n + 1), "one more")) for n in range(40)])
    build_small(folder, "texts", [{"text": text} for text in varied_texts(60)])
    steptron(*pretrain_arguments(folder / "texts", folder / "base", 2))
    (folder / "sft.yaml").write_text(STAGES.format(root=REPOSITORY, folder=folder))
    return folder


def test_both_stages_with_a_loss_for_each_domain(folder: Path) -> None:
    file = str(folder / "sft.yaml")
    steptron("sft", file, "--through", "broad")
    steptron("sft", file)
    records = read_records(folder / "sft/log.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [event.detail.split(" (")[0] for event in records if isinstance(event, EventRecord)] == ["broad", "dense"]
    assert [step.step for step in steps] == list(range(1, load(Path(file)).curriculum.steps + 1))
    assert steps[-1].lm_loss < steps[0].lm_loss
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    assert len(validations) == 2
    for validation in validations:
        assert validation.lm_loss == pytest.approx(sum(validation.domains.values()) / 2, rel=1e-12)
    domains = [str(folder / name) for name in ("greetings", "sums")]
    evaluated = json.loads(steptron("eval", str(folder / "sft"), *domains, "--json", "--packing", "best_fit").stdout)
    assert list(validations[-1].domains) == ["greetings", "sums"]
    for (_, loss), apart in zip(validations[-1].domains.items(), evaluated, strict=True):
        assert loss == pytest.approx(apart["lm_loss"], rel=1e-6)


def test_a_budget_in_epochs_is_that_many_packings(folder: Path) -> None:
    sums = TokenDataset.open(folder / "sums", "train")
    rows = pack(sums.lengths_D - 1, 64, seed=0).rows
    assert rows > 10
    for epochs, expected in ((1, rows), (2, 2 * rows), (0.5, math.ceil(rows / 2))):
        loaded = load(folder / "sft.yaml", [f"stages.1.epochs={epochs}"])
        assert loaded.stage("dense").tokens == expected * 64
    both = load(folder / "sft.yaml", ["stages.0.epochs=1", "stages.0.tokens=null"]).stage("broad").tokens
    greetings = TokenDataset.open(folder / "greetings", "train")
    assert both == (rows + pack(greetings.lengths_D - 1, 64, seed=0).rows) * 64


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.initial_weights=null"], "train.initial_weights: an assistant is made of a trained model"),
        (["data.packing=stream"], "stage broad: data.packing is stream, which cuts conversations"),
        (["stages.0.data.train=[{path: FOLDER/texts}]"], "stage broad: data.train.0.path: FOLDER/texts has texts"),
        (["data.validation.1.path=FOLDER/texts"], "data.validation.1.path: FOLDER/texts has texts"),
        (["data.validation.1.path=FOLDER/jinja"], "datasets of different chat templates in one run: FOLDER/"),
        (["data.sequence_length=8"], "set data.sequence_length to at least 49"),
        (["stages.0.data.train=[{path: FOLDER/none}]"], "FOLDER/none"),
    ],
)
def test_what_is_no_training_on_conversations_is_refused(folder: Path, overrides: list[str], said: str) -> None:
    if not (folder / "jinja").exists():
        template = folder / "template.jinja"
        template.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        )
        conversations(folder, "jinja", [chat(user(str(n)), says("Hi")) for n in range(20)], str(template))
    output = folder / "refused"
    given = [text.replace("FOLDER", str(folder)) for text in (*overrides, f"train.output={output}")]
    done = steptron("sft", str(folder / "sft.yaml"), *given, expect=2)
    assert said.replace("FOLDER", str(folder)) in done.stderr
    assert not output.exists()


def test_options_and_processes(folder: Path) -> None:
    """Options may come first; processes that are started train as the one alone does."""
    output = folder / "two"
    arguments = [f"train.output={output}", "stages.1.epochs=0.1"]
    steptron("sft", "--nproc", "2", str(folder / "sft.yaml"), *arguments)
    steps = [record for record in read_records(output / "log.jsonl") if isinstance(record, StepRecord)]
    alone = [record for record in read_records(folder / "sft/log.jsonl") if isinstance(record, StepRecord)]
    for one, two in zip(alone, steps[:4], strict=False):
        assert two.lm_loss == pytest.approx(one.lm_loss, rel=1e-5)
    assert "No such command" in steptron("sft", "biuld", expect=2).stderr
    assert "Trains on conversations" in steptron("sft", "--help").stdout
