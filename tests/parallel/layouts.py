"""Runs the nano preset under a layout; every function here is called in a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.schema import OptimizerConfig
from steptron.data.batch import MicroBatch
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import ModelSpec
from steptron.model.parameter_shards import Place, shard
from steptron.model.router import Router
from steptron.optim import buckets
from steptron.optim.ownership import Reduction
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.sharded_model import ShardedModel, buffer_plans
from steptron.train.step import Losses, TrainStep

NANO = Path(__file__).resolve().parents[2] / "configs" / "pretrain" / "nano.yaml"
NUM_MICRO_BATCHES, BATCH, SEQUENCE = 4, 2, 48
NEAR_TIE = 1e-6
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Part:
    """Part ``index`` of equal ones along ``axis`` of a matrix (of stacked experts: of the stack)."""

    axis: int
    index: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """What one rank saw; gradients and parameters by the name of the logical matrix, with the place of its part."""

    losses: list[Losses]
    tokens_per_expert: list[torch.Tensor]
    confidence: list[float]
    gradient_norms: list[float]
    gradients: dict[str, Part]
    parameters: dict[str, Part]
    smallest_gap: float


def make_batches(seed: int = 0, count: int = NUM_MICRO_BATCHES, batch: int = BATCH) -> list[MicroBatch]:
    """Micro-batches with documents of ragged lengths, padding, and very uneven numbers of loss tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for j in range(count):
        stream = torch.randint(0, 512, (batch, SEQUENCE + 1), generator=generator)
        lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (batch,), generator=generator)
        borders = torch.rand(batch, SEQUENCE, generator=generator) < 0.06
        documents = borders.cumsum(dim=1)
        valid = torch.arange(SEQUENCE) < lengths.unsqueeze(1)
        batches.append(_micro_batch(stream, documents.masked_fill(~valid, -1), 0.2 + 0.25 * j, generator))
    return batches


def batches_of_documents(seed: int, rows: list[list[int]]) -> list[MicroBatch]:
    """As many micro-batches as usual, whose rows hold documents of the given lengths, then padding."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.full((len(rows), SEQUENCE), -1)
    for row, lengths in zip(documents, rows, strict=True):
        start = 0
        for number, length in enumerate(lengths):
            row[start : start + length] = number
            start += length
    streams = torch.randint(0, 512, (NUM_MICRO_BATCHES, len(rows), SEQUENCE + 1), generator=generator)
    return [_micro_batch(stream, documents, 0.9, generator) for stream in streams]


def _micro_batch(
    stream: torch.Tensor, documents: torch.Tensor, kept_share: float, generator: torch.Generator
) -> MicroBatch:
    batch = documents.shape[0]
    positions = torch.zeros_like(documents)
    for b in range(batch):
        for t in range(1, SEQUENCE):
            positions[b, t] = positions[b, t - 1] + 1 if documents[b, t] == documents[b, t - 1] else 0
    next_document = torch.cat([documents[:, 1:], documents[:, -1:]], dim=1)
    kept = torch.rand(batch, SEQUENCE, generator=generator) < kept_share
    return MicroBatch(
        tokens_BS=stream[:, :-1].contiguous(),
        labels_BS=stream[:, 1:].contiguous(),
        loss_mask_BS=kept & (documents >= 0) & (next_document == documents),
        positions_BS=positions,
        documents_BS=documents,
    )


def run(
    rank: int,
    world_size: int,
    overrides: Sequence[str],
    steps: int,
    batches: list[MicroBatch] | None = None,
    bucket_elements: int = buckets.BUCKET_ELEMENTS,
    lr: float = LEARNING_RATE,
) -> Outcome:
    """Gradients at the initial parameters, and the parameters after some optimizer steps."""
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket_elements):
        return _run(world_size, overrides, steps, batches, lr)


def _run(world_size: int, overrides: Sequence[str], steps: int, batches: list[MicroBatch] | None, lr: float) -> Outcome:
    config = load(NANO, [*overrides, "data.sequence_length=48"]).config
    check(config, world_size)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    own = (batches or make_batches())[mesh.data_rank :: mesh.data_size]
    gaps = _watch_gaps(train)
    observed = train.accumulate_gradients(own)
    all_losses, all_tokens, norms = [observed.losses], [observed.tokens_per_expert_LE], []
    confidence = [observed.confidence or 0.0]
    gradients = reduced_gradients(train)
    for _ in range(steps):
        result = train.run(own, lr, bias_rate=1e-3)
        all_losses.append(result.observed.losses)
        all_tokens.append(result.observed.tokens_per_expert_LE)
        confidence.append(result.observed.confidence or 0.0)
        norms.append(result.gradient_norm)
    parameters = {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}
    return Outcome(
        all_losses,
        all_tokens,
        confidence,
        norms,
        parts_of(train.spec, mesh.place, gradients),
        parts_of(train.spec, mesh.place, parameters),
        min(gaps, default=1.0),
    )


def sharded_by(chunks: ModelChunks, config: OptimizerConfig, mesh: Mesh) -> ShardedModel:
    """A model with the buffers that an optimizer's configuration plans."""
    return ShardedModel(chunks, buffer_plans(chunks, config, mesh), mesh)


def reduced_gradients(train: TrainStep) -> dict[str, torch.Tensor]:
    """Whole reduced gradients of this rank's parameters, by name: what owners have, given to all that hold a part."""
    parameters = dict(train.chunks.named_parameters())
    gradients = {}
    for buffer in train.sharded.gradients:
        plan = buffer.plan
        if plan.layout.reduction is Reduction.REDUCE_SCATTER and plan.layout.ranks > 1:
            group = train.mesh.replicas(plan.replicas)
            for span in plan.layout.spans:
                group.all_gather(buffer.data[span.start : span.stop]).wait()
        for name in (held.parameter.name for held in plan.shards):
            gradients[name] = parameters[name].main_grad.clone()  # type: ignore[attr-defined]
    return gradients


def assemble(ranks: list[dict[str, Part]]) -> dict[str, torch.Tensor]:
    """Whole logical matrices from what the ranks hold; replicas must be bit-equal."""
    pieces: dict[str, dict[int, Part]] = {}
    for parts in ranks:
        for name, part in parts.items():
            known = pieces.setdefault(name, {}).setdefault(part.index, part)
            assert torch.equal(known.tensor, part.tensor), f"{name} differs between replicas"
    return {
        name: torch.cat([known[index].tensor for index in sorted(known)], dim=known[0].axis)
        for name, known in pieces.items()
    }


def parts_of(spec: ModelSpec, place: Place, tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """Logical matrices, as views, of a rank's tensors by logical name."""
    parts = {}
    for parameter in spec.parameters():
        if parameter.name in tensors:
            for part in shard(parameter, place).matrices:
                rows = slice(*part.rows)
                tensor = tensors[parameter.name]
                own = tensor[:, rows] if parameter.is_expert else tensor[rows]
                parts[part.matrix.name] = Part(part.axis, part.index, own)
    return parts


def _watch_gaps(train: TrainStep) -> list[float]:
    """Records how close the last selected expert and the first rejected one come."""
    gaps: list[float] = []

    def look(router: Router, inputs: Any, routing: Any) -> None:
        ranked = (routing.scores_TE.detach() + router.bias).sort(dim=1, descending=True).values
        k = router.spec.top_k
        if k < router.spec.num_experts:
            gaps.append(float((ranked[:, k - 1] - ranked[:, k]).min()))

    for router in train.chunks.routers().values():
        router.register_forward_hook(look)
    return gaps
