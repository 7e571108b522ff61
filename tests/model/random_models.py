"""Random tiny models in the released layout."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.model.released import config_json

LENGTH = 37
"""Tokens of a sequence: more than any window and any original length of the configurations."""


def random_config_json(seed: int) -> dict[str, Any]:
    """A config.json of the released layout: sizes, depth, groups, windows, scaling, limits and experts are drawn.

    Without a top-k of 1, whose renormalised weight is 1 and gives the router a gradient of mere rounding.
    """
    draw = random.Random(seed)
    layers, depths = draw.randint(2, 7), draw.randint(0, 3)
    period = draw.choice([2, 4])
    full = [index % period == 0 and index < layers for index in range(layers + depths)]
    experts = draw.choice([4, 5, 8, 12])
    first_moe = draw.randint(0, layers - 1)
    groups = draw.randint(1, 3)
    head_dim = draw.choice([8, 16])
    shape = {"num_attention_groups": groups, "head_dim": head_dim}
    theta = draw.choice([5e6, 1e5]), draw.choice([1e4, 1e3])
    fraction = draw.choice([0.25, 0.5, 0.75]), draw.choice([0.5, 1.0])

    def limits(first: int) -> list[float]:
        return [
            draw.uniform(0.5, 1.5) if first <= index < layers and draw.random() < 0.6 else 0.0
            for index in range(layers + depths)
        ]

    return config_json() | {
        "vocab_size": draw.choice([40, 64, 97]),
        "hidden_size": draw.choice([24, 32, 48]),
        "intermediate_size": draw.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": depths,
        **shape,
        "num_attention_heads": groups * draw.randint(1, 2),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            **shape,
            "true_head_dim": head_dim,
            "num_attention_heads": groups * draw.randint(2, 3),
        },
        "layer_types": ["full_attention" if kind else "sliding_attention" for kind in full],
        "sliding_window": draw.randint(2, 9),
        "rope_theta": [theta[0] if kind else theta[1] for kind in full],
        "partial_rotary_factors": [fraction[0] if kind else fraction[1] for kind in full],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": draw.choice([2.0, 4.0]),
            "original_max_position_embeddings": draw.choice([8, 16, 32]),
            "low_freq_factor": 1.0,
            "high_freq_factor": draw.choice([4.0, 32.0]),
        },
        "moe_layers_enum": ",".join(str(index) for index in range(first_moe, layers)),
        "moe_num_experts": experts,
        "moe_top_k": draw.randint(2, min(4, experts - 1)),
        "moe_intermediate_size": draw.choice([8, 16]),
        "share_expert_dim": draw.choice([16, 24]),
        "moe_router_scaling_factor": draw.choice([1.5, 3.0]),
        "swiglu_limits": limits(first_moe),
        "swiglu_limits_shared": limits(0),
    }


def random_ids(config: dict[str, Any], seed: int) -> torch.Tensor:
    """int64 [2, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config["vocab_size"], (2, LENGTH), generator=generator)
