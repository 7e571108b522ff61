"""The metrics that have a meaning to the server: what they are, and which of their aggregates says most.

Other names are taken, stored and shown too; nothing is derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Statistic = Literal["count", "mean", "rms", "min", "median", "max", "p99"]
Items = Literal["one", "expert", "matrix", "group", "rank", "depth"]
Cadence = Literal["micro_batch", "iteration", "sampled"]


@dataclass(frozen=True)
class Metric:
    """A measured quantity.

    Attributes:
        name: on the wire; with ``by_role`` followed by a dot and the role of a matrix: ``weight.norm.expert_up``.
        items: what its items are; of metrics by role this is of the roles of experts, ``expert_*``: the items of others
            are matrices that need not be alike.
        cadence: how often it is measured.
        headline: the statistic over micro-batches and replicas that stands for an item.
        description: in a phrase, with its unit.
        by_role: there is one for each role of matrices.
        relative: its max/median and min/median over the items are derived; by role, of experts' roles only.
        levels: the layer's median is derived, and how it stands beside other layers'.
    """

    name: str
    items: Items
    cadence: Cadence
    headline: Statistic
    description: str
    by_role: bool = False
    relative: bool = False
    levels: bool = False


METRICS = (
    Metric("moe.tokens", "expert", "micro_batch", "mean", "tokens routed to an expert", relative=True),
    Metric(
        "moe.intermediate_norm_rms",
        "expert",
        "micro_batch",
        "rms",
        "root mean square over its tokens of the norm of an expert's intermediate, the input of its down projection "
        "before the routing weight",
        relative=True,
    ),
    Metric(
        "moe.intermediate_norm_max",
        "expert",
        "micro_batch",
        "max",
        "largest norm of an expert's intermediate over its tokens",
        relative=True,
        levels=True,
    ),
    Metric(
        "moe.output_norm_rms",
        "expert",
        "micro_batch",
        "rms",
        "root mean square over its tokens of the norm of an expert's output before the routing weight",
        relative=True,
    ),
    Metric(
        "moe.output_norm_max",
        "expert",
        "micro_batch",
        "max",
        "largest norm of an expert's output over its tokens",
        relative=True,
        levels=True,
    ),
    Metric(
        "moe.probability",
        "expert",
        "micro_batch",
        "mean",
        "router probability of an expert, normalised over experts, mean over a rank's tokens",
    ),
    Metric(
        "moe.group_load",
        "group",
        "micro_batch",
        "mean",
        "token copies that reach an expert-parallel rank, over the mean of the group's ranks",
    ),
    Metric(
        "moe.group_share",
        "group",
        "micro_batch",
        "mean",
        "selections by a rank's tokens that fall on a group of experts, over the mean of the groups: what the balance "
        "loss sees",
    ),
    Metric(
        "moe.group_load_max",
        "one",
        "micro_batch",
        "mean",
        "largest load of an expert-parallel rank of a group in a micro-batch, over the mean of the group's ranks; made "
        "by the server",
    ),
    Metric(
        "moe.group_share_max",
        "one",
        "micro_batch",
        "mean",
        "largest share of a group of experts in a rank's micro-batch, over the mean of the groups; made by the server",
    ),
    Metric(
        "moe.confidence",
        "one",
        "micro_batch",
        "mean",
        "routing confidence: router probability of a token's selected experts, mean over tokens",
    ),
    Metric(
        "moe.alignment",
        "expert",
        "sampled",
        "mean",
        "||silu(g) * u|| / (||silu(g)|| ||u||) of an expert's gate g and up u, mean over its tokens; 1 when aligned",
    ),
    Metric("weight.norm", "expert", "iteration", "mean", "Frobenius norm of a matrix", by_role=True, relative=True),
    Metric("gradient.norm", "expert", "iteration", "mean", "norm of a matrix's gradient, clipped", by_role=True),
    Metric(
        "update.norm",
        "expert",
        "iteration",
        "mean",
        "norm of a matrix's update in the step, weight decay apart",
        by_role=True,
    ),
    Metric("muon.largest", "expert", "iteration", "max", "Muon's largest intermediate, absolute", by_role=True),
    Metric(
        "gradient.dot_weight", "expert", "sampled", "mean", "inner product of a matrix with its gradient", by_role=True
    ),
    Metric(
        "gradient.stable_rank",
        "expert",
        "sampled",
        "mean",
        "||G||_F^2 / ||G||_2^2 of a matrix's gradient",
        by_role=True,
    ),
    Metric("train.loss", "one", "iteration", "mean", "training objective, nats"),
    Metric("train.lm_loss", "one", "iteration", "mean", "cross entropy of the main head, nats per token"),
    Metric("train.mtp_loss", "depth", "iteration", "mean", "cross entropy of an MTP depth, nats per token"),
    Metric("train.ep_loss", "one", "iteration", "mean", "EP-group balance loss, 1 at balance"),
    Metric("train.grad_norm", "one", "iteration", "mean", "global gradient norm before clipping"),
    Metric("train.learning_rate", "one", "iteration", "mean", "learning rate"),
    Metric("train.batch_size", "one", "iteration", "mean", "sequences of the step"),
    Metric("train.tokens_per_second", "one", "iteration", "mean", "tokens per second, all devices together"),
    Metric("train.model_tflops", "one", "iteration", "mean", "model TFLOP/s per device"),
    Metric("validation.lm_loss", "one", "sampled", "mean", "cross entropy of the main head on validation data, nats"),
    Metric(
        "rank.compute_seconds",
        "rank",
        "iteration",
        "mean",
        "time in the step that a rank spends in attention alone, where it waits for no other",
    ),
    Metric("rank.stage", "rank", "iteration", "mean", "pipeline stage of a rank; ranks of one stage do the same work"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}
_OF_MATRICES = {metric.name: replace(metric, items="matrix", relative=False) for metric in METRICS if metric.by_role}


def find(name: str) -> Metric | None:
    """What is known of a metric, of experts' matrices or of others by its role; None for other names."""
    metric = _BY_NAME.get(name)
    if metric is not None:
        return None if metric.by_role else metric
    base, _, role = name.rpartition(".")
    of_matrices = _OF_MATRICES.get(base)
    return _BY_NAME[base] if of_matrices is not None and role.startswith("expert_") else of_matrices
