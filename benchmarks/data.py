"""Building, filtering and loading data on two cores, against what the tokenizer library alone does on them.

The reference is the `tokenizers` library's ``encode_batch_fast`` on the same texts, which lie in memory, with two
threads of its own. Building is all of `steptron data build` and `steptron sft build` with two processes: starting them,
reading JSONL, tokenizing, splitting, writing, hashing. Texts are the sources of Python's standard library,
conversations those that `steptron sft stdlib-conversations` makes of them, which are short (140 tokens on average).
`data filter` runs the rules of configs/data/filter.yaml, and half of the conversations' questions as a benchmark to
decontaminate against. A ratio is the library's time over that of a contender, for the same text, in turns. Loading is
how fast samples are made, and, in a short run of the `tiny` preset, the share of a training step that waits for them.

    python -m benchmarks.data [--only build load] [--rounds 5] [--copies 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["RAYON_NUM_THREADS"] = "2"  # read when the library makes its threads

# Processes that are started import this file: what they do not need is imported where it is used.
from benchmarks.harness import interleave, median, print_result, print_table
from steptron.data.build import BuildOptions, build_dataset
from steptron.data.chat.build import ChatBuildOptions, build_chat_dataset
from steptron.data.chat.conversation import parse_conversation
from steptron.data.chat.pieces import text_of
from steptron.data.chat.stdlib_conversations import write_conversations
from steptron.data.chat.template import built_in
from steptron.data.stdlib_corpus import collect
from steptron.data.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[1]
THREADS = 2
VOCABULARY = 4096
TARGETS = {"build": 0.8, "waiting_stream": 0.01, "waiting_best_fit": 0.01}
LENGTHS = (4_096, 131_072)
STEPS = 16


class Corpora:
    """Texts and conversations as files and in memory, and a tokenizer.

    Args:
        folder: to write to.
        copies: of both; one is 12 MB of sources and 7 MB of conversations.
    """

    def __init__(self, folder: Path, copies: int) -> None:
        self.folder = folder
        collect(folder / "once.jsonl")
        build_dataset(
            BuildOptions([folder / "once.jsonl"], folder / "first", train_vocab_size=VOCABULARY, workers=THREADS)
        )
        self.tokenizer = Tokenizer.load(folder / "first")
        write_conversations(folder / "once.jsonl", folder / "chats")
        self.texts = self._copied("once.jsonl", "texts.jsonl", copies)
        for name in ("docs", "code", "tools", "arithmetic"):
            self._copied(f"chats/{name}.jsonl", f"conversations/{name}.jsonl", copies)
        self.conversations = folder / "conversations"
        lines = self.texts.read_text(encoding="utf-8").splitlines()
        self.plain = [json.loads(line)["text"] for line in lines]
        template = built_in("step3p5")
        self.rendered = [
            text_of(sample)
            for file in sorted(self.conversations.iterdir())
            for line in file.read_text(encoding="utf-8").splitlines()
            for sample in template.samples(parse_conversation(line))
        ]
        questions = (folder / "chats/docs.jsonl").read_text(encoding="utf-8").splitlines()[::2]
        (folder / "questions.jsonl").write_text(
            "".join(json.dumps({"question": json.loads(line)["messages"][0]["content"]}) + "\n" for line in questions)
        )
        (folder / "filter.yaml").write_text(
            f"base: {REPOSITORY}/configs/data/filter.yaml\n"
            "filters: {decontamination: {benchmarks: {questions: {files: "
            f"[{folder}/questions.jsonl], fields: [question]}}}}}}}}\n"
        )

    def _copied(self, source: str, target: str, copies: int) -> Path:
        """Every document as often as that, each time with another beginning."""
        path = self.folder / target
        path.parent.mkdir(exist_ok=True)
        lines = (self.folder / source).read_text(encoding="utf-8").splitlines(keepends=True)
        with path.open("w", encoding="utf-8") as file:
            for _ in range(copies):
                file.writelines(lines)
        return path

    # --------------------------------------------------------------------------------- contenders

    def reference(self, texts: list[str]) -> int:
        """The library alone; returns how many tokens there are."""
        return sum(map(len, self.tokenizer.encode_batch(texts)))

    def build(self) -> int:
        options = BuildOptions(
            [self.texts], self.folder / "built", tokenizer=self.folder / "first", workers=THREADS, force=True
        )
        manifest = build_dataset(options).manifest
        return manifest.train.tokens + manifest.validation.tokens

    def sft_build(self) -> int:
        options = ChatBuildOptions(
            [self.conversations], self.folder / "chat-built", self.folder / "first", workers=THREADS, force=True
        )
        return build_chat_dataset(options).summary.total.tokens

    def filter(self) -> int:
        """Returns bytes of text."""
        from steptron.data.filters.config import load_filters
        from steptron.data.filters.run import FilterOptions, filter_corpus

        options = FilterOptions(
            inputs=[self.texts],
            output=self.folder / "filtered",
            config=load_filters(self.folder / "filter.yaml"),
            workers=THREADS,
            force=True,
        )
        report = filter_corpus(options).report
        return report.kept.bytes + report.removed.bytes


def building(corpora: Corpora, rounds: int) -> dict[str, float]:
    counts: dict[str, int] = {}

    def counted(name: str, run: Callable[[], int]) -> None:
        counts[name] = run()

    contenders = {
        "tokenizers, texts": partial(corpora.reference, corpora.plain),
        "data build": corpora.build,
        "data filter": corpora.filter,
        "tokenizers, conversations": partial(corpora.reference, corpora.rendered),
        "sft build": corpora.sft_build,
    }
    seconds = interleave({name: partial(counted, name, run) for name, run in contenders.items()}, rounds, warmup=1)
    # What is filtered is counted in tokens too: as many as its bytes have.
    of_text = sum(len(text.encode()) for text in corpora.plain)
    counts["data filter"] = round(counts["data filter"] / of_text * counts["tokenizers, texts"])
    ratios: dict[str, float] = {}
    rows = []
    for name, reference, key in (
        ("tokenizers, texts", "tokenizers, texts", ""),
        ("data build", "tokenizers, texts", "build"),
        ("data filter", "tokenizers, texts", "filter"),
        ("tokenizers, conversations", "tokenizers, conversations", ""),
        ("sft build", "tokenizers, conversations", "sft_build"),
    ):
        ratio = statistics.median(b / a for a, b in zip(seconds[name], seconds[reference], strict=True))
        if key:
            ratios[key] = ratio
        rows.append([name, f"{counts[name]:,}", f"{counts[name] / median(seconds[name]):,.0f}", f"{ratio:.2f}"])
    print_table("Tokens per second on two cores", ["", "tokens", "tokens/s", "library's time over its"], rows)
    return ratios


def loading(corpora: Corpora) -> dict[str, float]:
    """Sources as a stream, and conversations, none of which is longer than a row, packed."""
    from steptron.config.schema import DataConfig, DatasetConfig
    from steptron.data.sources import open_source

    corpora.sft_build()
    datasets = {"stream": corpora.folder / "first", "best_fit": corpora.folder / "chat-built"}
    rows = []
    for packing, dataset in datasets.items():
        for length in LENGTHS:
            settings = {"train": [DatasetConfig(path=dataset)], "sequence_length": length, "packing": packing}
            data = DataConfig.model_validate(settings)
            source = open_source(data.train, "train", data)
            source.micro_batch(0, 1)
            start, samples = time.perf_counter(), 0
            while time.perf_counter() - start < 2.0:
                source.micro_batch(samples, 1)
                samples += 1
            rows.append([packing, f"{length:,}", f"{samples * length / (time.perf_counter() - start):,.0f}"])
    print_table("Samples made by one process", ["packing", "tokens a row", "tokens/s"], rows)
    shares = {f"waiting_{packing}": _waiting(corpora.folder, dataset, packing) for packing, dataset in datasets.items()}
    table = [[name.removeprefix("waiting_"), f"{share:.3%}"] for name, share in shares.items()]
    print_table(f"Waiting for data, of a training step of tiny ({STEPS} steps)", ["packing", "share"], table)
    return shares


def _waiting(folder: Path, dataset: Path, packing: str) -> float:
    """Share of the time of steps, but for the first two, as `steptron pretrain` logs it."""
    from steptron.train.records import StepRecord, read_records

    output = folder / f"run-{packing}"
    command = [
        *(sys.executable, "-m", "steptron", "pretrain", "configs/pretrain/tiny-quickstart.yaml", "--fresh"),
        *(f"data.train=[{{path: {dataset}}}]", "data.validation=[]", f"train.output={output}", f"train.steps={STEPS}"),
        *(f"data.packing={packing}", "data.sequence_length=4096", "train.logging.tensorboard=false"),
        *("train.global_batch_size=2", "train.micro_batch_size=1", "train.validation.batches=1"),
        *("optimizer.schedule={kind: constant, warmup_steps: 0}", "parallel.expert=1", "telemetry.server=null"),
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=600)
    steps = [record for record in read_records(output / "log.jsonl") if isinstance(record, StepRecord)][2:]
    return sum(step.data_seconds for step in steps) / sum(step.step_seconds for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["build", "load"], default=["build", "load"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=4, help="of the corpora, that starting processes counts less")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = Corpora(folder, arguments.copies)
        ratios: dict[str, float] = {}
        if "build" in arguments.only:
            ratios |= building(corpora, arguments.rounds)
        if "load" in arguments.only:
            ratios |= loading(corpora)
    print_result("data", ratios, {name: target for name, target in TARGETS.items() if name in ratios})


if __name__ == "__main__":
    main()
