"""Model configurations that the planning tests count by hand."""

from __future__ import annotations

from typing import Any

from steptron.config.schema import ModelConfig


def flash(layout: str = "S3F1+heads+gate", **changes: Any) -> ModelConfig:
    """The released model's shape (facts of the release, section 3)."""
    fields: dict[str, Any] = dict(
        vocab_size=128896,
        hidden_size=4096,
        num_layers=45,
        num_dense_layers=3,
        layout=layout,
        head_dim=128,
        dense_hidden_size=11264,
        full=dict(num_heads=64, num_kv_groups=8, rope=dict(theta=5e6, rotary_fraction=0.5)),
        sliding=dict(num_heads=96, num_kv_groups=8, window=512, rope=dict(theta=1e4)),
        moe=dict(num_experts=288, top_k=8, expert_hidden_size=1280, shared_hidden_size=1280),
        clamp=dict(routed={43: 7.0, 44: 7.0}, shared={44: 16.0}),
        mtp=dict(depths=3),
    )
    return ModelConfig.model_validate(fields | changes)


def small(layout: str = "S1F1+heads+gate", **changes: Any) -> ModelConfig:
    """Layers 0 full dense, 1 sliding dense, 2 full MoE, 3 sliding MoE; 2 MTP depths."""
    fields: dict[str, Any] = dict(
        vocab_size=1000,
        hidden_size=64,
        num_layers=4,
        num_dense_layers=2,
        layout=layout,
        head_dim=16,
        dense_hidden_size=96,
        full=dict(num_heads=4, num_kv_groups=2, rope=dict(theta=5e6, rotary_fraction=0.5)),
        sliding=dict(num_heads=6, num_kv_groups=3, window=6, rope=dict(theta=1e4)),
        moe=dict(num_experts=8, top_k=3, expert_hidden_size=32, shared_hidden_size=48),
        mtp=dict(depths=2),
    )
    return ModelConfig.model_validate(fields | changes)
