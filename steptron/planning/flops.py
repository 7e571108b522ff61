"""Model FLOPs per token, counted from the layer specs.

The definition: a training step costs 6 FLOPs per matrix parameter that acts on the token (2 forward,
4 backward), and 12 · heads · head_dim · k̄ per attention layer for scores and weighted values, with k̄
the mean number of visible keys. Of the experts only the selected ones act; embeddings, norms, sinks
and biases do not count; MTP depths count when they are in training. Recomputation is no model FLOP.
The number of selected experts is fixed, so balance does not change the count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from steptron.model.layer_spec import (
    EXPERT_ROLES,
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoeFfnSpec,
    MtpSpec,
    ParameterRole,
)
from steptron.model.stages import Stage

_ATTENTION = frozenset(
    {
        ParameterRole.QUERY,
        ParameterRole.KEY,
        ParameterRole.VALUE,
        ParameterRole.HEAD_GATE,
        ParameterRole.ATTENTION_OUTPUT,
    }
)
_DENSE = frozenset({ParameterRole.FFN_GATE, ParameterRole.FFN_UP, ParameterRole.FFN_DOWN})
_SHARED = frozenset({ParameterRole.SHARED_GATE, ParameterRole.SHARED_UP, ParameterRole.SHARED_DOWN})
_LAYER_MATRICES = _ATTENTION | _DENSE | _SHARED | EXPERT_ROLES | {ParameterRole.ROUTER}
_BACKWARD_AND_FORWARD = 3


@dataclass(frozen=True)
class FlopsBreakdown:
    """FLOPs per token by what they are spent on; the fields add up to ``total``.

    Attributes:
        attention_projections: query, key, value, gate and output matrices.
        attention_scores: scores and weighted values, over the mean number of visible keys.
        dense_ffn: dense feed-forward layers.
        routed_experts: selected experts.
        shared_experts: shared experts.
        router: routers.
        mtp_projections: matrices that join embedding and hidden state at each MTP depth.
        heads: output matrices, one use each by the main model and by every MTP depth counted.
    """

    attention_projections: float
    attention_scores: float
    dense_ffn: float
    routed_experts: float
    shared_experts: float
    router: float
    mtp_projections: float
    heads: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def training_flops_per_token(spec: ModelSpec, sequence_length: int, mtp_depths_trained: int) -> FlopsBreakdown:
    """FLOPs per token of forward and backward, averaged over the positions of a sequence.

    Args:
        spec: the model.
        sequence_length: tokens S per sequence; documents are taken to fill it.
        mtp_depths_trained: MTP depths in training, counted from the nearest.

    Raises:
        ValueError: S below 1, or more depths in training than the model has.
    """
    forward = forward_flops_per_token(spec, sequence_length, mtp_depths_trained)
    return FlopsBreakdown(*(_BACKWARD_AND_FORWARD * part for part in dataclasses.astuple(forward)))


def forward_flops_per_token(spec: ModelSpec, sequence_length: int, mtp_depths: int = 0) -> FlopsBreakdown:
    """FLOPs per token of the forward pass alone (a prefill), averaged over the positions of a sequence.

    Args:
        spec: the model.
        sequence_length: tokens S per sequence.
        mtp_depths: MTP depths that run, counted from the nearest.

    Raises:
        ValueError: S below 1, or more depths than the model has.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    if not 0 <= mtp_depths <= len(spec.mtp):
        raise ValueError(
            f"MTP depths {mtp_depths}: the model has {len(spec.mtp)} (model.mtp.depths), "
            "at most as many can be in training (loss.mtp_train_depths)"
        )
    depths = spec.mtp[:mtp_depths]
    layers = spec.layers + tuple(depth.layer for depth in depths)
    by_role = _active_matrix_sizes(spec, depths)

    def matrices(roles: Iterable[ParameterRole]) -> int:
        return 2 * sum(by_role[role] for role in roles)

    return FlopsBreakdown(
        attention_projections=matrices(_ATTENTION),
        attention_scores=float(sum(_score_flops(layer.attention, sequence_length) for layer in layers)),
        dense_ffn=matrices(_DENSE),
        routed_experts=matrices(EXPERT_ROLES),
        shared_experts=matrices(_SHARED),
        router=matrices({ParameterRole.ROUTER}),
        mtp_projections=matrices({ParameterRole.MTP_PROJECTION}),
        heads=matrices({ParameterRole.HEAD}),
    )


def stage_forward_flops(spec: ModelSpec, stage: Stage, sequence_length: int, mtp_depths: int = 0) -> float:
    """FLOPs per token of the forward pass of one pipeline stage: its share of ``forward_flops_per_token``.

    Args:
        spec: the whole model.
        stage: the stage; the last one has the heads and the MTP depths.
        sequence_length: tokens S per sequence.
        mtp_depths: MTP depths that run.
    """
    flops = sum(_layer_flops(spec.layers[index], sequence_length) for index in stage.layers)
    if stage.is_last:
        flops += 2 * (1 + mtp_depths) * spec.vocab_size * spec.hidden_size
        for depth in spec.mtp[:mtp_depths]:
            flops += _layer_flops(depth.layer, sequence_length) + 4 * spec.hidden_size**2
    return flops


def _layer_flops(layer: LayerSpec, sequence_length: int) -> float:
    matrices = 0
    for parameter in layer.parameters():
        if parameter.role not in _LAYER_MATRICES:
            continue
        matrices += parameter.size
        if parameter.is_expert and isinstance(layer.ffn, MoeFfnSpec):
            matrices -= parameter.size // layer.ffn.num_experts * (layer.ffn.num_experts - layer.ffn.top_k)
    return 2 * matrices + float(_score_flops(layer.attention, sequence_length))


def mean_visible_keys(window: int | None, sequence_length: int) -> Fraction:
    """Mean number k̄ of keys that a position of a causal sequence sees, itself included: (S + 1)/2 without
    a window, or with one that the sequence does not fill; W − W(W − 1)/(2S) for a window W ≤ S."""
    if window is None or window > sequence_length:
        return Fraction(sequence_length + 1, 2)
    return window - Fraction(window * (window - 1), 2 * sequence_length)


def _score_flops(attention: AttentionSpec, sequence_length: int) -> Fraction:
    """Forward FLOPs per token: 2 per multiplication and addition, for q·k and for the weighted values."""
    return 4 * attention.query_size * mean_visible_keys(attention.window, sequence_length)


def _active_matrix_sizes(spec: ModelSpec, depths: tuple[MtpSpec, ...]) -> dict[ParameterRole, int]:
    """Matrix parameters that act on one token, by role."""
    parameters = spec.main_parameters() + [parameter for depth in depths for parameter in depth.parameters()]
    selected = {
        parameter.name: layer.ffn.top_k
        for layer in spec.layers
        if isinstance(layer.ffn, MoeFfnSpec)
        for parameter in layer.parameters()
        if parameter.is_expert
    }
    sizes = dict.fromkeys(ParameterRole, 0)
    for parameter in parameters:
        for matrix in parameter.matrices:
            first, end = matrix.rows
            sizes[matrix.role] += selected.get(parameter.name, 1) * (end - first) * parameter.shape[-1]
    sizes[ParameterRole.HEAD] += sum(not depth.own_head for depth in depths) * spec.vocab_size * spec.hidden_size
    return sizes
