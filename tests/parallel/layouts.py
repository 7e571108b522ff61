"""Runs the nano preset under a layout; every function here is called in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.model.router import Router
from steptron.parallel.mesh import build_mesh
from steptron.train.step import Losses, TrainStep

NANO = Path(__file__).resolve().parents[2] / "configs" / "pretrain" / "nano.yaml"
NUM_MICRO_BATCHES, BATCH, SEQUENCE = 4, 2, 48
NEAR_TIE = 1e-6
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Outcome:
    """What one rank saw; gradients and parameters by logical name, experts with their first index."""

    losses: list[Losses]
    tokens_per_expert: list[torch.Tensor]
    gradient_norms: list[float]
    gradients: dict[str, tuple[int, torch.Tensor]]
    parameters: dict[str, tuple[int, torch.Tensor]]
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
        documents = documents.masked_fill(~valid, -1)
        positions = torch.zeros_like(documents)
        for b in range(batch):
            for t in range(1, SEQUENCE):
                positions[b, t] = positions[b, t - 1] + 1 if documents[b, t] == documents[b, t - 1] else 0
        next_document = torch.cat([documents[:, 1:], documents[:, -1:]], dim=1)
        kept = torch.rand(batch, SEQUENCE, generator=generator) < (0.2 + 0.25 * j)
        batches.append(
            MicroBatch(
                tokens_BS=stream[:, :-1].contiguous(),
                labels_BS=stream[:, 1:].contiguous(),
                loss_mask_BS=kept & valid & (next_document == documents),
                positions_BS=positions,
                documents_BS=documents,
            )
        )
    return batches


def run(
    rank: int,
    world_size: int,
    overrides: Sequence[str],
    steps: int,
    batches: list[MicroBatch] | None = None,
) -> Outcome:
    """Gradients at the initial parameters, and the parameters after some optimizer steps."""
    config = load(NANO, [*overrides, "data.sequence_length=48"]).config
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    own = (batches or make_batches())[mesh.data_rank :: mesh.data_size]
    gaps = _watch_gaps(train)
    observed = train.accumulate_gradients(own)
    all_losses, all_tokens, norms = [observed.losses], [observed.tokens_per_expert_LE], []
    gradients = {p.spec.name: p.tensor.main_grad.clone() for p in train.trained_parameters()}
    for _ in range(steps):
        result = train.run(own, LEARNING_RATE, bias_rate=1e-3)
        all_losses.append(result.observed.losses)
        all_tokens.append(result.observed.tokens_per_expert_LE)
        norms.append(result.gradient_norm)
    parameters = {name: tensor.detach().clone() for name, tensor in train.module.logical_tensors()}
    return Outcome(
        all_losses,
        all_tokens,
        norms,
        _placed(config, mesh.expert_rank, mesh.expert_size, train, gradients),
        _placed(config, mesh.expert_rank, mesh.expert_size, train, parameters),
        min(gaps, default=1.0),
    )


def assemble(parts: list[dict[str, tuple[int, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Full logical tensors from what the ranks hold; replicas must be bit-equal."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for part in parts:
        for name, (first, tensor) in part.items():
            known = pieces.setdefault(name, {})
            if first in known:
                assert torch.equal(known[first], tensor), f"{name} differs between replicas"
            known[first] = tensor
    return {name: torch.cat([known[first] for first in sorted(known)]) for name, known in pieces.items()}


def _placed(
    config: PretrainConfig, expert_rank: int, expert_size: int, train: TrainStep, tensors: dict[str, torch.Tensor]
) -> dict[str, tuple[int, torch.Tensor]]:
    experts = {p.name for p in train.spec.parameters() if p.is_expert}
    first = expert_rank * config.model.moe.num_experts // expert_size
    return {name: (first if name in experts else 0, tensor) for name, tensor in tensors.items()}


def _watch_gaps(train: TrainStep) -> list[float]:
    """Records how close the last selected expert and the first rejected one come."""
    gaps: list[float] = []

    def look(router: Router, inputs: Any, routing: Any) -> None:
        ranked = (routing.scores_TE.detach() + router.bias).sort(dim=1, descending=True).values
        k = router.spec.top_k
        gaps.append(float((ranked[:, k - 1] - ranked[:, k]).min()))

    for router in train.module.routers().values():
        router.register_forward_hook(look)
    return gaps
