"""What a run takes from the weights that it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steptron.checkpoint.fit import Filling
from steptron.checkpoint.weights import ReleasedWeights
from steptron.config.loader import with_overrides
from steptron.config.schema import PretrainConfig
from steptron.errors import ConfigError
from steptron.train.step import TrainStep
from tests.model.helpers import single_process

CASE = Path(__file__).resolve().parents[1] / "data" / "step3p5" / "tiny"


def started(*overrides: str) -> TrainStep:
    """The first step of a run of the released tiny case, with overrides."""
    raw = {
        "model": ReleasedWeights(CASE).model.model_dump(),
        "loss": {"mtp_train_depths": 0},
        "data": {"train": [{"path": "unused"}], "sequence_length": 40},
        "optimizer": {"lr": 1e-3},
        "train": {"output": "unused", "steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
    }
    config = with_overrides(PretrainConfig.model_validate(raw), overrides, "the case")
    return TrainStep(config, single_process(), torch.device("cpu"), ReleasedWeights(CASE, Filling.of(config)))


def test_master_weights_start_from_them() -> None:
    train = started("train.precision=bf16")
    tensors = dict(train.chunks.named_parameters())
    masters = train.optimizer.state()["master"]
    assert sum(state.tensor.numel() for state in masters) == sum(t.numel() for t in tensors.values() if t.requires_grad)
    for state in masters:
        piece = state.owned.piece
        own = tensors[piece.shard.parameter.name].detach().view(-1)[piece.start : piece.stop]
        assert torch.equal(state.tensor, own.float()), state.owned.name
    assert tensors["head.weight"].float().std() > 0.1


def test_mtp_depths_may_be_left_out() -> None:
    assert len(started("model.mtp.depths=1").spec.mtp) == 1


def test_missing_mtp_depths_are_cloned_from_the_first() -> None:
    """The case has three; each keeps its own."""
    train = started("model.mtp.depths=5", "train.initial_weights_missing={mtp: clone}")
    own, tensors = dict(started().chunks.logical_tensors()), dict(train.chunks.logical_tensors())
    for name, tensor in tensors.items():
        source = name.replace("mtp.3.", "mtp.0.").replace("mtp.4.", "mtp.0.")
        assert torch.equal(tensor, own[source]), name
    for depth in (1, 2):
        assert not torch.equal(tensors[f"mtp.{depth}.projection.weight"], tensors["mtp.0.projection.weight"])


def test_a_missing_value_head_is_drawn_as_the_configuration_says() -> None:
    override = "train.initial_weights_missing={value_head: initialise}"
    scaled = started("model.value_head=true", override, "model.init.value_head_std=2.0")
    values = dict(scaled.chunks.logical_tensors())["value_head.weight"]
    assert 1.0 < values.std() < 3.0


@pytest.mark.parametrize(
    "override, problem",
    [
        ("model.num_layers=8", r"layers.8.attention_norm.weight \[64\] is not part of this model"),
        ("model.layout=S3F1+heads", r"layers.0.attention.gate.weight \[4, 64\] is not part of this model"),
        ("model.mtp.depths=4", r"MTP depth 4 \(mtp.3\) is not there: set train.initial_weights_missing.mtp to clone"),
        ("model.value_head=true", r"value_head.weight \[1, 64\] is not there: set train.initial_weights_missing"),
        ("model.vocab_size=130", r"embedding.weight has shape \[128, 64\], the model needs \[130, 64\]"),
    ],
)
def test_nothing_else_is_left_out_or_made_up(override: str, problem: str) -> None:
    changes = [override, "model.clamp={routed: {7: 1.0}, shared: {}}"]
    with pytest.raises(ConfigError, match=problem):
        started(*changes)
