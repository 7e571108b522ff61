"""transformers' own implementation of the released model agrees with ours, on the given case and on random ones.

It is an independent one: nothing is shared but the released layout, config.json and tensors, which both read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from steptron.checkpoint.released.model_config import read_model_config
from steptron.checkpoint.released.transformers_names import HEAD, to_transformers
from steptron.model.layer_spec import model_spec
from tests.model.helpers import assert_all_close, build_model, gradients, watch_selection_gaps
from tests.model.random_models import LENGTH, random_config_json, random_ids
from tests.model.released import (
    NEAR_TIE,
    case_batch,
    case_logits,
    config_json,
    expected,
    load_released,
    random_weights,
    released_weights,
    split_released,
)

TOLERANCE = 1e-4
SEEDS = range(12)
_NOT_THEIRS = {"architectures", "model_type", "torch_dtype"}
"""What a configuration class refuses: these choose the class and the dtype."""


def transformers_model(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> torch.nn.Module:
    """``Step3p7TextModel`` with an output matrix ``lm_head``, which its text-only class lacks."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    theirs = Step3p7TextConfig(**{key: value for key, value in config.items() if key not in _NOT_THEIRS})
    theirs._attn_implementation = "eager"
    model = Step3p7TextModel(theirs).eval()
    model.lm_head = torch.nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
    model.load_state_dict(to_transformers(weights))
    # Where config.json names no padding token, as the release's does not, theirs takes token 1 and gives its embedding
    # no gradient.
    model.embed_tokens.padding_idx = None
    return model


def transformers_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=ids).last_hidden_state
    return F.linear(hidden, model.get_parameter(HEAD))


@cache
def drawn(seed: int) -> dict[str, Any]:
    return random_config_json(seed)


def test_the_given_case() -> None:
    right = expected()
    with torch.no_grad():
        logits = transformers_logits(transformers_model(config_json(), released_weights()), right["input_ids"])
    assert (logits - right["logits"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(seed: int) -> None:
    """Logits, loss and every gradient."""
    raw, ids = drawn(seed), random_ids(drawn(seed), seed)
    assert max(raw["sliding_window"], raw["rope_scaling"]["original_max_position_embeddings"]) < LENGTH
    config = read_model_config(raw, "random config.json")
    weights = random_weights(model_spec(config), seed)
    ours, theirs = build_model(config), transformers_model(raw, weights)
    load_released(ours, weights)
    gaps = watch_selection_gaps(ours)

    logits, _ = case_logits(ours, ids)
    their_logits = transformers_logits(theirs, ids)
    assert min(gaps) >= NEAR_TIE
    assert (logits - their_logits).abs().max() <= TOLERANCE
    assert their_logits.std() > 1

    their_loss = F.cross_entropy(their_logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    main_loss = ours(case_batch(ids))[0]
    assert main_loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    their_loss.backward()
    main_loss.backward()
    own = to_transformers(split_released(ours, gradients(ours)))
    right = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    assert right.keys() == dict(theirs.named_parameters()).keys()
    assert_all_close(own, right, TOLERANCE)


def test_the_random_models_differ_in_every_size() -> None:
    for key in (
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "hidden_size",
        "num_attention_heads",
        "num_attention_groups",
        "head_dim",
        "layer_types",
        "sliding_window",
        "rope_scaling",
        "moe_layers_enum",
        "moe_num_experts",
        "moe_top_k",
        "moe_router_scaling_factor",
        "swiglu_limits",
        "swiglu_limits_shared",
    ):
        assert len({str(drawn(seed)[key]) for seed in SEEDS}) >= 2, key
