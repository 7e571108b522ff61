"""A Step-3.5 forward pass in plain torch, written from the mathematics of the release alone.

It shares nothing with ``steptron``: a dict of tensors under the released names and the raw ``config.json`` go in,
logits come out, in the dtype of the tensors (float64 where it serves as the truth). Every step is the textbook
formula without any thought for speed, so that autograd gives the true gradients too.

``Variant`` has a switch for each known way to get the model wrong. A comparison that is worth its name tells every
one of them from the released model, but for the two-sided clamp, which is the same function.

Shapes: B sequences, S tokens, T = B·S, H hidden, N query heads, G key-value groups, D head dimensions, F width of a
feed-forward, E experts, K selected ones, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-5
"""Not in config.json: the default of the release's configuration class."""

Limit = float
"""Activation limit of a feed-forward; 0 means none."""


@dataclass(frozen=True)
class Variant:
    """What is computed; the defaults are the released model, everything else is wrong.

    Attributes:
        norm_gain: what a norm multiplies by. Stored weights are gamma - 1.
        theta: base of the rotary frequencies, each layer's own or this one on all layers.
        full_rotary_fraction: share of a full layer's head dimensions that is rotated, the configured one or this.
        scaled_layers: layers whose rotary frequencies are scaled.
        scaling_constants: the configured ones, or those that Megatron-Core has built in (1, 4, 8192).
        rotary_pairs: dimension m turns with m + d/2 (halves) or with its neighbour (interleaved).
        query_key_norm: before the rotation, after it, or not at all.
        extra_window: keys that a sliding layer sees beyond the window; None: all earlier ones.
        head_gate: input of the gate: the normalised hidden state, the residual itself, or no gate.
        clamp: limits after SiLU (one-sided on the gate branch), on both sides there, before SiLU, or none.
        shared_limit: limit of a shared expert: its own, or the routed experts'.
        router_scores: function of the router's outputs.
        selection_bias: used for selecting, not at all, or in the weights too.
        renormalise: routing weights are divided by their sum.
        scale_routed: routing weights are multiplied by the scaling factor.
        scale_shared: the shared expert is multiplied by it too.
        mtp_input: main state that depth 0 reads: before the final norm or after it.
        mtp_chain: state that a depth hands to the next: before its final norm or after it.
        mtp_order: what comes first in the concatenation that a depth projects.
        mtp_head: output matrix of a depth: its own or the main model's.
    """

    norm_gain: Literal["one_plus_weight", "weight"] = "one_plus_weight"
    theta: float | None = None
    full_rotary_fraction: float | None = None
    scaled_layers: Literal["full", "none", "all"] = "full"
    scaling_constants: Literal["configured", "megatron_core"] = "configured"
    rotary_pairs: Literal["halves", "interleaved"] = "halves"
    query_key_norm: Literal["before_rotation", "after_rotation", "none"] = "before_rotation"
    extra_window: int | None = 0
    head_gate: Literal["normalised", "residual", "none"] = "normalised"
    clamp: Literal["after_silu", "after_silu_two_sided", "before_silu", "none"] = "after_silu"
    shared_limit: Literal["own", "routed"] = "own"
    router_scores: Literal["sigmoid", "softmax"] = "sigmoid"
    selection_bias: Literal["selection", "none", "selection_and_weights"] = "selection"
    renormalise: bool = True
    scale_routed: bool = True
    scale_shared: bool = False
    mtp_input: Literal["pre_norm", "post_norm"] = "pre_norm"
    mtp_chain: Literal["pre_norm", "post_norm"] = "pre_norm"
    mtp_order: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    mtp_head: Literal["own", "main"] = "own"


RELEASED = Variant()


def forward(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], input_ids_BS: Tensor, variant: Variant = RELEASED
) -> tuple[Tensor, Tensor]:
    """Logits of the main model and of every MTP depth.

    Args:
        weights: tensors under the released names, all of one dtype.
        config: the raw ``config.json``.
        input_ids_BS: int64 [B, S].
        variant: what to compute differently.

    Returns:
        logits [B, S, V], and MTP logits [depths, B, S, V]: those of depth k at position t are for token t + 2 + k.
        Embeddings past the end are those of token 0.
    """
    model = _Reference(weights, config, variant)
    return model.logits(input_ids_BS)


@dataclass(frozen=True)
class Losses:
    """Mean cross entropies and their weighted sum; ``mtp`` is [depths]."""

    lm: Tensor
    mtp: Tensor
    total: Tensor


def training_losses(logits: Tensor, mtp_logits: Tensor, input_ids_BS: Tensor) -> Losses:
    """total = lm + 0.3 · Σ_k 0.6^k mtp_k / Σ_k 0.6^k, each the mean over positions that have a target."""
    lm = _cross_entropy(logits, input_ids_BS, 1)
    mtp = [_cross_entropy(logits_k, input_ids_BS, 2 + k) for k, logits_k in enumerate(mtp_logits)]
    if not mtp:
        return Losses(lm, lm.new_zeros(0), lm)
    alpha = torch.tensor([0.6**k for k in range(len(mtp))], dtype=lm.dtype)
    stacked = torch.stack(mtp)
    return Losses(lm, stacked, lm + 0.3 * (alpha / alpha.sum() * stacked).sum())


def _cross_entropy(logits_BSV: Tensor, input_ids_BS: Tensor, ahead: int) -> Tensor:
    """Mean over the positions whose ``ahead``-th next token exists."""
    return F.cross_entropy(logits_BSV[:, :-ahead].flatten(0, 1), input_ids_BS[:, ahead:].flatten())


class _Reference:
    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], variant: Variant) -> None:
        self.weights = weights
        self.config = config
        self.variant = variant
        self.num_layers = int(config["num_hidden_layers"])
        self.moe_layers = {int(index) for index in config["moe_layers_enum"].split(",")}

    def logits(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        embedding_VH = self.weights["model.embed_tokens.weight"]
        head_VH = self.weights["lm_head.weight"]
        x = embedding_VH[ids_BS]
        for index in range(self.num_layers):
            x = self.block(index, x)
        normed = self.norm(x, "model.norm.weight")
        main = normed @ head_VH.T

        hidden = x if self.variant.mtp_input == "pre_norm" else normed
        depths = []
        for k in range(self.config["num_nextn_predict_layers"]):
            prefix = f"model.layers.{self.num_layers + k}"
            following_BS = F.pad(ids_BS, (0, 1 + k))[:, 1 + k :]  # token t + 1 + k; 0 past the end
            parts = [
                self.norm(embedding_VH[following_BS], f"{prefix}.enorm.weight"),
                self.norm(hidden, f"{prefix}.hnorm.weight"),
            ]
            if self.variant.mtp_order == "hidden_embedding":
                parts.reverse()
            y = torch.cat(parts, dim=-1) @ self.weights[f"{prefix}.eh_proj.weight"].T
            y = self.block(self.num_layers + k, y)
            normed = self.norm(y, f"{prefix}.transformer.shared_head.norm.weight")
            own_head_VH = self.weights[f"{prefix}.transformer.shared_head.output.weight"]
            depths.append(normed @ (own_head_VH if self.variant.mtp_head == "own" else head_VH).T)
            hidden = y if self.variant.mtp_chain == "pre_norm" else normed
        return main, torch.stack(depths) if depths else main.new_zeros(0, *main.shape)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        gain = 1 + weight if self.variant.norm_gain == "one_plus_weight" else weight
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + NORM_EPS) * gain

    def block(self, index: int, x: Tensor) -> Tensor:
        prefix = f"model.layers.{index}"
        x = x + self.attention(index, self.norm(x, f"{prefix}.input_layernorm.weight"), x)
        return x + self.ffn(index, self.norm(x, f"{prefix}.post_attention_layernorm.weight"))

    # ------------------------------------------------------------------------- attention

    def attention(self, index: int, h: Tensor, residual: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]; ``residual`` is the block's input before the norm."""
        prefix = f"model.layers.{index}.self_attn"
        sliding = self.config["layer_types"][index] == "sliding_attention"
        sizes = self.config["attention_other_setting"] if sliding else self.config
        groups, D = sizes["num_attention_groups"], sizes["head_dim"]
        batch, length, _ = h.shape

        def project(part: str) -> Tensor:
            """[B, heads, S, D]"""
            return (h @ self.weights[f"{prefix}.{part}.weight"].T).view(batch, length, -1, D).transpose(1, 2)

        q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
        if self.variant.query_key_norm == "before_rotation":
            q, k = self.norm(q, f"{prefix}.q_norm.weight"), self.norm(k, f"{prefix}.k_norm.weight")
        q, k = self.rotate(index, q), self.rotate(index, k)
        if self.variant.query_key_norm == "after_rotation":
            q, k = self.norm(q, f"{prefix}.q_norm.weight"), self.norm(k, f"{prefix}.k_norm.weight")

        heads_per_group = sizes["num_attention_heads"] // groups  # query head j reads group j // heads_per_group
        k, v = k.repeat_interleave(heads_per_group, dim=1), v.repeat_interleave(heads_per_group, dim=1)
        scores_BNSS = q @ k.transpose(-1, -2) / math.sqrt(D)
        ago_SS = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        visible_SS = ago_SS >= 0
        if sliding and self.variant.extra_window is not None:
            visible_SS &= ago_SS < self.config["sliding_window"] + self.variant.extra_window
        o = scores_BNSS.masked_fill(~visible_SS, -math.inf).softmax(dim=-1) @ v

        if self.variant.head_gate != "none":
            gate_input = h if self.variant.head_gate == "normalised" else residual
            gate_BSN = gate_input @ self.weights[f"{prefix}.g_proj.weight"].T
            o = o * gate_BSN.sigmoid().transpose(1, 2)[..., None]
        return o.transpose(1, 2).flatten(2) @ self.weights[f"{prefix}.o_proj.weight"].T

    def rotate(self, index: int, x: Tensor) -> Tensor:
        """Rotary embedding of [B, heads, S, D] at positions 0 … S - 1."""
        frequencies = self.frequencies(index, x.shape[-1]).to(x.dtype)
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        turned, rest = x[..., : 2 * len(frequencies)], x[..., 2 * len(frequencies) :]
        if self.variant.rotary_pairs == "halves":
            x1, x2 = turned.chunk(2, dim=-1)
            return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)

    def frequencies(self, index: int, head_dim: int) -> Tensor:
        """float64 [d / 2], radians per token; d is the rotated width."""
        full = self.config["layer_types"][index] == "full_attention"
        fraction = self.config["partial_rotary_factors"][index]
        if full and self.variant.full_rotary_fraction is not None:
            fraction = self.variant.full_rotary_fraction
        theta = self.config["rope_theta"][index] if self.variant.theta is None else self.variant.theta
        d = round(head_dim * fraction)
        omega = theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        if not {"full": full, "none": False, "all": True}[self.variant.scaled_layers]:
            return omega
        scaling = self.config["rope_scaling"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        if self.variant.scaling_constants == "megatron_core":
            low, high, original = 1.0, 4.0, 8192
        periods = original * omega / (2 * math.pi)
        kept = ((periods - low) / (high - low)).clamp(0, 1)
        return omega * kept + omega / scaling["factor"] * (1 - kept)

    # ---------------------------------------------------------------------- feed-forward

    def ffn(self, index: int, h: Tensor) -> Tensor:
        prefix = f"model.layers.{index}"
        shared_limit = self.config["swiglu_limits_shared"][index]
        if index not in self.moe_layers:
            return self.swiglu(f"{prefix}.mlp", h, shared_limit)
        routed_limit = self.config["swiglu_limits"][index]
        if self.variant.shared_limit == "routed":
            shared_limit = routed_limit
        routed = self.routed_experts(f"{prefix}.moe", h.flatten(0, 1), routed_limit).view_as(h)
        shared = self.swiglu(f"{prefix}.share_expert", h, shared_limit)
        if self.variant.scale_shared:
            shared = shared * self.config["moe_router_scaling_factor"]
        return routed + shared

    def routed_experts(self, prefix: str, h_TH: Tensor, limit: Limit) -> Tensor:
        """Weighted sum of every expert over every token; experts that are not selected have weight 0."""
        weights_TE = self.routing_weights(prefix, h_TH)
        gate_TEF = torch.einsum("th,efh->tef", h_TH, self.weights[f"{prefix}.gate_proj.weight"])
        up_TEF = torch.einsum("th,efh->tef", h_TH, self.weights[f"{prefix}.up_proj.weight"])
        product_TEF = self.activation(gate_TEF, up_TEF, limit)
        return torch.einsum("te,tef,ehf->th", weights_TE, product_TEF, self.weights[f"{prefix}.down_proj.weight"])

    def routing_weights(self, prefix: str, h_TH: Tensor) -> Tensor:
        """[T, E], 0 for experts that are not selected."""
        outputs_TE = h_TH @ self.weights[f"{prefix}.gate.weight"].T
        scores_TE = outputs_TE.sigmoid() if self.variant.router_scores == "sigmoid" else outputs_TE.softmax(dim=-1)
        biased_TE = scores_TE + self.weights[f"{prefix}.router_bias"].detach()
        ranking_TE = scores_TE if self.variant.selection_bias == "none" else biased_TE
        selected_TK = ranking_TE.topk(self.config["moe_top_k"], dim=-1).indices
        chosen_TE = torch.zeros_like(scores_TE).scatter(1, selected_TK, 1)
        weights_TE = chosen_TE * (biased_TE if self.variant.selection_bias == "selection_and_weights" else scores_TE)
        if self.variant.renormalise:
            weights_TE = weights_TE / (weights_TE.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TE * self.config["moe_router_scaling_factor"] if self.variant.scale_routed else weights_TE

    def swiglu(self, prefix: str, h: Tensor, limit: Limit) -> Tensor:
        gate, up = (h @ self.weights[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up"))
        return self.activation(gate, up, limit) @ self.weights[f"{prefix}.down_proj.weight"].T

    def activation(self, gate: Tensor, up: Tensor, limit: Limit) -> Tensor:
        clamp = self.variant.clamp
        if not limit or clamp == "none":
            return F.silu(gate) * up
        up = up.clamp(-limit, limit)
        if clamp == "before_silu":
            return F.silu(gate.clamp(max=limit)) * up
        return F.silu(gate).clamp(-limit if clamp == "after_silu_two_sided" else None, limit) * up
