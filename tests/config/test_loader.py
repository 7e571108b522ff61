from __future__ import annotations

from pathlib import Path

import pytest

from steptron.config.loader import Loaded, load
from steptron.config.tree import Source
from steptron.errors import ConfigError, UserError
from tests.config.samples import MINIMAL, write

SIZE = "a whole number greater than 0 and of at most 2147483647"
RATE = "a finite number greater than 0 and of at most 1e+30"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(text: str = MINIMAL, *overrides: str) -> Loaded:
    return load(write(Path(), "run.yaml", text), overrides)


def problems(text: str = MINIMAL, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, *overrides)
    return caught.value.problems


# ------------------------------------------------------------------------------------ composition


def test_later_bases_win_and_the_file_wins_over_all() -> None:
    write(Path(), "bases/whole.yaml", MINIMAL)
    write(Path(), "bases/first.yaml", "train: {steps: 20, seed: 20}\ndata: {seed: 20}")
    write(Path(), "bases/second.yaml", "train: {steps: 30, seed: 30}")
    config = loaded("base: [bases/whole.yaml, bases/first.yaml, bases/second.yaml]\ntrain: {steps: 40}").config
    assert (config.train.steps, config.train.seed, config.data.seed) == (40, 30, 20)
    assert config.train.global_batch_size == 4


def test_bases_are_relative_to_their_file_and_nest() -> None:
    write(Path(), "deep/whole.yaml", MINIMAL)
    write(Path(), "deep/middle/mid.yaml", "base: ../whole.yaml\ntrain: {steps: 7}")
    assert loaded("base: deep/middle/mid.yaml").config.train.steps == 7


def test_a_file_may_be_reached_twice() -> None:
    write(Path(), "whole.yaml", MINIMAL)
    write(Path(), "a.yaml", "base: whole.yaml\ntrain: {steps: 7}")
    write(Path(), "b.yaml", "base: whole.yaml\ntrain: {seed: 7}")
    config = loaded("base: [a.yaml, b.yaml]").config
    # b brings whole.yaml's own steps again, and comes later.
    assert (config.train.steps, config.train.seed) == (10, 7)


def test_a_file_that_is_reached_often_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path(), "0.yaml", MINIMAL)
    for number in range(1, 31):  # 2^30 ways from the last to the first
        write(Path(), f"{number}.yaml", f"base: [{number - 1}.yaml, {number - 1}.yaml]")
    assert loaded("base: 30.yaml").config.train.steps == 10


def test_bases_of_a_link_are_relative_to_the_link() -> None:
    write(Path(), "one/whole.yaml", MINIMAL)
    write(Path(), "two/whole.yaml", "train: {steps: 7}")
    Path("two/link.yaml").symlink_to(write(Path(), "one/link.yaml", "base: whole.yaml").absolute())
    assert loaded("base: [one/link.yaml, two/link.yaml]").config.train.steps == 7


def test_lists_are_replaced_and_mappings_merged() -> None:
    write(Path(), "whole.yaml", MINIMAL)
    config = loaded("base: whole.yaml\ndata: {train: [{path: runs/c}]}").config
    assert [str(dataset.path) for dataset in config.data.train] == ["runs/c"]
    assert config.data.sequence_length == 32


def test_replace_takes_a_mapping_whole() -> None:
    write(Path(), "whole.yaml", MINIMAL.replace("  moe:", "  clamp: {routed: {3: 1.0, 4: 1.0}}\n  moe:"))
    assert loaded("base: whole.yaml\nmodel: {clamp: {routed: {2: 5}}}").config.model.clamp.routed == {2: 5, 3: 1, 4: 1}
    replaced = loaded("base: whole.yaml\nmodel: {clamp: {routed: !replace {2: 5}}}").config
    assert replaced.model.clamp.routed == {2: 5.0}


def test_a_cycle_is_refused_with_the_chain() -> None:
    write(Path(), "a.yaml", "base: b.yaml")
    write(Path(), "b.yaml", "train: {steps: 1}\nbase: [c.yaml]")
    write(Path(), "c.yaml", "base:\n  - a.yaml")
    with pytest.raises(ConfigError) as caught:
        load(Path("a.yaml"))
    assert caught.value.problems == ("c.yaml:2: the file builds on itself: a.yaml -> b.yaml -> c.yaml -> a.yaml",)


def test_a_missing_base_is_refused_with_the_chain() -> None:
    write(Path(), "sub/a.yaml", "base: [nowhere.yaml]")
    assert problems("\nbase: sub/a.yaml") == (
        "sub/a.yaml:1: base sub/nowhere.yaml does not exist (run.yaml -> sub/a.yaml -> sub/nowhere.yaml)",
    )


def test_base_takes_paths() -> None:
    assert problems("base: {a: 1}") == ("run.yaml:1: base: takes a path or a list of paths",)
    assert problems('base:\n  - 3\n  - \'\'\n  - "a\\0b"\n  - "\\ud800"') == tuple(
        f"run.yaml:{line}: base: takes a path or a list of paths" for line in (2, 3, 4, 5)
    )
    assert "does not exist" in problems(f"base: {'x' * 5000}")[0]
    Path("circle.yaml").symlink_to("circle.yaml")
    assert "does not exist" in problems("base: circle.yaml")[0]


def test_unreadable_files() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file or directory"):
        load(Path("nowhere.yaml"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(Path())
    Path("latin.yaml").write_bytes(b"train: \xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text: byte 7 cannot be decoded"):
        load(Path("latin.yaml"))
    assert problems("- a") == ("run.yaml:1: a configuration file holds a mapping with keys such as model:",)


def test_an_empty_file_lacks_the_required_sections() -> None:
    found = problems("")
    assert [problem.split(" ")[0] for problem in found] == ["model", "data", "optimizer", "train"]
    assert found[0].startswith("model is missing: the architecture; expected a mapping with keys vocab_size, ")
    assert found[0].endswith("[run.yaml:1]")


def test_problems_of_several_files_and_overrides_are_shown_together() -> None:
    write(Path(), "a.yaml", "x: 1\nx: 2")
    found = problems("base: [a.yaml, b.yaml]\ny: 1\ny: 2", "train.steps")
    assert [problem.split(": ")[0] for problem in found] == [
        "run.yaml:3",
        "a.yaml:2",
        "run.yaml:1",
        "override train.steps",
    ]


def test_the_message_lists_every_problem() -> None:
    with pytest.raises(UserError) as caught:
        loaded(MINIMAL.replace("steps: 10", "steps: ten\n  stepz: 3"), "data.seed=-1")
    assert str(caught.value) == (
        "run.yaml: 3 problems\n"
        "  - data.seed: -1 is not a whole number of at least 0 (seed of the order of samples) [override data.seed=-1]\n"
        f"  - train.steps: 'ten' is not {SIZE} (optimizer steps) [run.yaml:20]\n"
        "  - train.stepz is not a known key; did you mean train.steps? [run.yaml:21]"
    )


# ------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.stepz=1", "train.stepz is not a known key; did you mean train.steps?"),
        ("optimiser={lr: 1}", "optimiser is not a known key; did you mean optimizer?"),
        # The key exists, in another section.
        ("train.lr=1", "train.lr is not a known key; did you mean optimizer.lr?"),
        ("data.train.0.pth=1", "data.train.0.pth is not a known key; did you mean data.train.0.path?"),
        ("model.full.rope.tetha=1", "model.full.rope.tetha is not a known key; did you mean model.full.rope.theta?"),
        (
            "model.weight=1",
            "model.weight is not a known key; did you mean data.train.0.weight or data.validation.0.weight?",
        ),
        (
            "loss.zzz=1",
            "loss.zzz is not a known key; known keys here: mtp_weight, mtp_decay, mtp_train_depths",
        ),
        (
            "loss={'[key]': 1}",
            "loss.[key] is not a known key; known keys here: mtp_weight, mtp_decay, mtp_train_depths",
        ),
        ("loss.3=1", "loss.3 is not a known key; known keys here: mtp_weight, mtp_decay, mtp_train_depths"),
        ("base=x.yaml", "base is not a known key; base: stands at the top of a file and is not an override"),
    ],
)
def test_unknown_keys(override: str, problem: str) -> None:
    assert problems(MINIMAL, override) == (f"{problem} [override {override}]",)


def test_a_missing_key_names_the_section_that_lacks_it() -> None:
    assert problems(MINIMAL.replace("  head_dim: 16\n", "")) == (
        f"model.head_dim is missing: dimensions of one attention head; expected {SIZE} [run.yaml:1]",
    )


# ----------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.steps=ten", f"train.steps: 'ten' is not {SIZE} (optimizer steps)"),
        ("train.steps='10'", f"train.steps: '10' is not {SIZE} (optimizer steps)"),
        ("train.steps=1e3", f"train.steps: 1000.0 is not {SIZE} (optimizer steps)"),
        ("train.steps=true", f"train.steps: true is not {SIZE} (optimizer steps)"),
        ("train.steps=", f"train.steps: null is not {SIZE} (optimizer steps)"),
        ("train.steps=0", f"train.steps: 0 is not {SIZE} (optimizer steps)"),
        ("train.steps=[1, 2]", f"train.steps: a list of 2 is not {SIZE} (optimizer steps)"),
        ("optimizer.lr=fast", f"optimizer.lr: 'fast' is not {RATE} (peak learning rate)"),
        ("optimizer.lr=.nan", f"optimizer.lr: .nan is not {RATE} (peak learning rate)"),
        ("optimizer.lr=.inf", f"optimizer.lr: .inf is not {RATE} (peak learning rate)"),
        ("optimizer.lr=-1e-3", f"optimizer.lr: -0.001 is not {RATE} (peak learning rate)"),
        ("optimizer.lr=true", f"optimizer.lr: true is not {RATE} (peak learning rate)"),
        (
            "optimizer.beta1=1.0",
            "optimizer.beta1: 1.0 is not a finite number of at least 0 and less than 1 "
            "(AdamW's decay of the first moment)",
        ),
        (
            "train.precision=fp16",
            "train.precision: 'fp16' is not fp32 or bf16 "
            "(dtype of parameters and residual; bf16 keeps fp32 master weights)",
        ),
        (
            "train.deterministic=yes",
            "train.deterministic: 'yes' is not true or false (use only deterministic operations)",
        ),
        (
            "train.checkpoint=3",
            "train.checkpoint: 3 is not a mapping with keys every_steps, asynchronous, keep, keep_every_steps, "
            "keep_best, keep_requested, tolerated_failures, verify (saving and resuming)",
        ),
        (
            "train.threads=0",
            "train.threads: 0 is not a whole number greater than 0 and of at most 4096 or null "
            "(CPU threads per process; when unset, OMP_NUM_THREADS or its share of the physical cores)",
        ),
        (
            "data.train=[]",
            "data.train: an empty list is not a list of at least 1, each item a mapping with keys path, weight "
            "(datasets to train on, blended by tokens)",
        ),
        (
            "data.train.0.path=3",
            "data.train.0.path: 3 is not a non-empty path that a file can have "
            "(folder written by `steptron data build`)",
        ),
        (
            "model.clamp.routed={3: big}",
            "model.clamp.routed.3: 'big' is not a finite number greater than 0 (limit of the routed experts, by layer)",
        ),
        (
            "model.clamp.routed={last: 7}",
            "model.clamp.routed: the key 'last' is not a whole number (limit of the routed experts, by layer)",
        ),
        (
            "model.full.rope.scaling={factor: two, original_length: 64}",
            "model.full.rope.scaling.factor: 'two' is not a finite number greater than 0 "
            "(divisor of the low frequencies)",
        ),
        (
            "train.logging.wandb_project=3",
            "train.logging.wandb_project: 3 is not text or null (Weights & Biases project; off when unset)",
        ),
    ],
)
def test_wrong_values(override: str, problem: str) -> None:
    assert problems(MINIMAL, override) == (f"{problem} [override {override}]",)


@pytest.mark.parametrize(
    ("field", "largest"),
    [
        ("parallel.timeout_seconds", 7 * 24 * 3600),
        ("train.threads", 4096),
        ("model.moe.num_experts", 1_000_000),
        ("model.num_layers", 10_000),
        ("model.mtp.depths", 100),
        *(
            (field, 2**31 - 1)
            for field in (
                "model.vocab_size",
                "model.hidden_size",
                "model.moe.expert_hidden_size",
                "model.sliding.window",
                "data.sequence_length",
                "train.steps",
                "train.global_batch_size",
                "train.micro_batch_size",
            )
        ),
    ],
)
def test_largest_values(field: str, largest: int) -> None:
    loaded(MINIMAL, f"{field}={largest}")
    (problem,) = problems(MINIMAL, f"{field}={largest + 1}")
    assert problem.startswith(f"{field}: {largest + 1} is not a whole number ")
    assert f" of at most {largest}" in problem


@pytest.mark.parametrize("field", ["train.seed", "data.seed", "train.checkpoint.every_steps"])
def test_whole_numbers_have_64_bits(field: str) -> None:
    loaded(MINIMAL, f"{field}={2**63 - 1}")
    for value in (2**63, "9" * 5000, "0x" + "f" * 5000):
        override = f"{field}={value}"
        assert problems(MINIMAL, override) == (f"override {override}: whole numbers must be from -2^63 to 2^63 - 1",)


@pytest.mark.parametrize("field", ["optimizer.eps", "model.norm_eps"])
def test_epsilons_do_not_vanish_in_float32(field: str) -> None:
    loaded(MINIMAL, f"{field}=1e-30")
    assert " is not a finite number of at least 1e-30 " in problems(MINIMAL, f"{field}=9e-31")[0]


@pytest.mark.parametrize("field", ["train.output", "data.train.0.path"])
@pytest.mark.parametrize(("text", "shown"), [("''", "''"), ('"a\\0b"', r"'a\x00b'"), ('"\\ud800"', r"'\ud800'")])
def test_paths_are_names_that_a_file_can_have(field: str, text: str, shown: str) -> None:
    (problem,) = problems(MINIMAL, f"{field}={text}")
    assert problem.startswith(f"{field}: {shown} is not a non-empty path that a file can have (folder ")


def test_a_wrong_value_in_a_base_names_the_base() -> None:
    write(Path(), "whole.yaml", MINIMAL.replace("lr: 1e-3", "lr: fast"))
    assert problems("base: whole.yaml")[0].endswith("[whole.yaml:17]")


def test_numbers_as_people_write_them() -> None:
    config = loaded(
        MINIMAL, "optimizer.lr=1e-3", "optimizer.eps=1E-9", "train.steps=1_000", "optimizer.weight_decay=1"
    ).config
    assert (config.optimizer.lr, config.optimizer.eps, config.train.steps) == (1e-3, 1e-9, 1000)
    assert config.optimizer.weight_decay == 1.0 and isinstance(config.optimizer.weight_decay, float)


# -------------------------------------------------------------------------------------- overrides


def test_overrides() -> None:
    config = loaded(
        MINIMAL,
        "train.steps=3",
        "train.steps=4",
        "data.train.1.weight=2",
        "model.clamp.routed={4: 1.0}",
        "model.clamp.routed.3=2",
        "train.batch_ramp={start: 2, increment: 2, sequences: 8}",
        "train.batch_ramp.sequences=6",
        "optimizer.schedule.kind=constant",
        "train.output=runs/a=b",
        "model.full.rope.scaling.factor=2",
        "model.full.rope.scaling.original_length=64",
    ).config
    assert config.train.steps == 4
    assert [dataset.weight for dataset in config.data.train] == [1.0, 2.0]
    assert config.model.clamp.routed == {4: 1.0, 3: 2.0}
    assert config.train.batch_ramp is not None and config.train.batch_ramp.sequences == 6
    assert config.optimizer.schedule.kind == "constant"
    assert config.train.output == Path("runs/a=b")
    assert config.model.full.rope.scaling is not None and config.model.full.rope.scaling.original_length == 64


def test_overrides_replace_mappings_and_clear_values() -> None:
    text = MINIMAL + "  batch_ramp: {start: 2, increment: 2, sequences: 8}\n"
    assert loaded(text).config.train.batch_ramp is not None
    assert loaded(text, "train.batch_ramp=null").config.train.batch_ramp is None
    text = MINIMAL.replace("{lr: 1e-3}", "{lr: 1e-3, schedule: {warmup_steps: 5}}")
    assert loaded(text, "optimizer.schedule={kind: constant}").config.optimizer.schedule.warmup_steps == 0


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.steps", "override train.steps: expected dotted.key=value, for example train.steps=100"),
        ("=3", "override =3: expected dotted.key=value, for example train.steps=100"),
        ("train..steps=3", "override train..steps=3: expected dotted.key=value, for example train.steps=100"),
        (
            "data.train.2.weight=1",
            "override data.train.2.weight=1: data.train is a list of 2 [run.yaml:12]; "
            "'2' is not one of its indices (from 0)",
        ),
        (
            "data.train.weight=1",
            "override data.train.weight=1: data.train is a list of 2 [run.yaml:12]; "
            "'weight' is not one of its indices (from 0)",
        ),
        (
            "train.steps.x=1",
            "override train.steps.x=1: train.steps is the single value 10 [run.yaml:20]; it has no key 'x'",
        ),
        (
            "train.steps={a: 1, a: 2}",
            "override train.steps={a: 1, a: 2}: key 'a' is given twice; the first is in line 1",
        ),
    ],
)
def test_bad_overrides(override: str, problem: str) -> None:
    assert problems(MINIMAL, override) == (problem,)


def test_an_override_that_is_not_yaml() -> None:
    assert problems(MINIMAL, "train.steps=[1")[0].startswith("override train.steps=[1: not valid YAML: ")


# ---------------------------------------------------------------------------------------- sources


def test_sources() -> None:
    write(Path(), "whole.yaml", MINIMAL)
    sources = loaded("base: whole.yaml\n\ntrain:\n  steps: 5", "data.train.1.weight=2").sources[0]
    assert sources["model.hidden_size"] == Source("file", "whole.yaml", 3)
    assert sources["model.full.rope.theta"] == Source("file", "whole.yaml", 8)
    assert sources["data.train.0.path"] == Source("file", "whole.yaml", 13)
    assert sources["data.train.0.weight"] == Source("default")
    assert sources["data.train.1.weight"] == Source("override", text="data.train.1.weight=2")
    assert sources["train.steps"] == Source("file", "run.yaml", 4)
    assert sources["train.global_batch_size"] == Source("file", "whole.yaml", 21)
    assert sources["model.clamp.routed"] == Source("default")
    assert "model" not in sources and "data.train" not in sources


def test_files_outside_the_working_directory_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "run.yaml", MINIMAL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert str(load(Path("../run.yaml")).sources[0]["train.steps"]) == f"{path}:20"


# --------------------------------------------------------------------------- defaults that depend


def test_a_frozen_router_defaults_to_no_bias_update() -> None:
    assert loaded().config.balance.bias.rate == 1e-3
    assert loaded(MINIMAL, "balance.freeze_router=true").config.balance.bias.rate == 0
    asked = loaded(MINIMAL, "balance.freeze_router=true", "balance.bias.rate=1e-2").config
    assert asked.balance.bias.rate == 1e-2  # refused by the checks, not changed silently
    assert loaded(MINIMAL, "balance.freeze_router=true").sources[0]["balance.bias.rate"] == Source("default")


def test_without_mtp_no_depth_is_trained_by_default() -> None:
    assert loaded().config.loss.mtp_train_depths == 0
    assert loaded(MINIMAL, "model.mtp.depths=2").config.loss.mtp_train_depths == 1
    assert loaded(MINIMAL, "loss.mtp_train_depths=1").config.loss.mtp_train_depths == 1


def test_keys_of_overrides_that_no_configuration_has() -> None:
    name = ".".join("a" * 5000)
    assert problems(MINIMAL, f"{name}=1") == (f"override {name}=1: the key is more than 64 levels deep",)
    assert "is not one of its indices" in problems(MINIMAL, f"data.train.{'9' * 5000}.path=x")[0]
    assert "is not a whole number" in problems(MINIMAL, f"model.clamp.routed.{'9' * 5000}=1")[0]
