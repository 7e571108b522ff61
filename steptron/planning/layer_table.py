"""The layer table of a model: equal layers gathered into one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptron.model.layer_spec import DenseFfnSpec, LayerSpec, MoeFfnSpec


@dataclass(frozen=True)
class LayerRow:
    """Layers that differ in their index only.

    Attributes:
        layer: the first of them.
        indices: their indices, ascending.
        parameters: parameters of one of them.
    """

    layer: LayerSpec
    indices: tuple[int, ...]
    parameters: int


def layer_rows(layers: Iterable[LayerSpec]) -> list[LayerRow]:
    """Groups equal layers; rows are ordered by their first layer."""
    groups: dict[LayerSpec, list[LayerSpec]] = {}
    for layer in layers:
        groups.setdefault(dataclasses.replace(layer, index=0), []).append(layer)
    return [
        LayerRow(
            members[0],
            tuple(member.index for member in members),
            sum(parameter.size for parameter in members[0].parameters()),
        )
        for members in groups.values()
    ]


HEADINGS = ("attention", "heads", "window", "RoPE", "gate", "feed-forward", "clamp")
"""Columns of ``describe_layer``."""


def describe_layer(layer: LayerSpec) -> tuple[str, ...]:
    """The cells of one layer, under ``HEADINGS``; ``legend`` explains them."""
    attention, ffn = layer.attention, layer.ffn
    extras = [name for name, present in (("gate", attention.gate), ("sink", attention.sink)) if present]
    if isinstance(ffn, DenseFfnSpec):
        feed_forward = f"dense {ffn.hidden_size:,}"
        limits = {"": ffn.clamp}
    else:
        feed_forward = f"MoE {ffn.num_experts} top {ffn.top_k}, {ffn.expert_hidden_size:,} + {ffn.shared.hidden_size:,}"
        limits = {"routed ": ffn.expert_clamp, "shared ": ffn.shared.clamp}
    return (
        attention.kind.value,
        f"{attention.num_heads}/{attention.num_kv_groups} x {attention.head_dim}",
        "-" if attention.window is None else f"{attention.window:,}",
        f"{_power(attention.rope.theta)}, {attention.rope.rotary_dim}/{attention.head_dim}"
        + (", scaled" if attention.rope.scaling else ""),
        "+".join(extras) or "-",
        feed_forward,
        ", ".join(f"{name}{limit:g}" for name, limit in limits.items() if limit is not None) or "-",
    )


def legend(layers: Sequence[LayerSpec]) -> list[str]:
    """What the cells of these layers mean, one line per column that needs it."""
    lines = ["heads: query / key-value heads x dimensions; RoPE: theta, rotated / all dimensions of a head"]
    lines += [
        f"scaled: llama3 frequencies, factor {scaling.factor:g}, low {scaling.low_freq_factor:g}, "
        f"high {scaling.high_freq_factor:g}, original length {scaling.original_length:,}"
        for scaling in dict.fromkeys(layer.attention.rope.scaling for layer in layers)
        if scaling is not None
    ]
    lines += [
        f"MoE: experts, selected ones (weights x {factor:g}), width of a routed + of the shared expert"
        for factor in dict.fromkeys(layer.ffn.scaling_factor for layer in layers if isinstance(layer.ffn, MoeFfnSpec))
    ]
    lines += [
        f"clamp: largest activation, gate branch clamped {'after' if after_silu else 'before'} SiLU"
        for after_silu in dict.fromkeys(
            layer.ffn.clamp_after_silu for layer in layers if describe_layer(layer)[-1] != "-"
        )
    ]
    return lines


def index_ranges(indices: Sequence[int]) -> str:
    """Ascending indices with runs joined: ``0, 4-6, 8``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _power(value: float) -> str:
    """The shorter of two notations: ``5e6`` for 5,000,000, ``12345`` for 12,345."""
    mantissa, exponent = f"{value:.14e}".split("e")
    return min(f"{float(mantissa):.15g}e{int(exponent)}", f"{value:.15g}", key=len)
