"""One optimizer step, and one evaluation, of the model on this process's place in the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.balance import BalanceContext, bias_update
from steptron.model.init import initialise
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.model.transformer_config import transformer_config
from steptron.optim.base import NamedParameter
from steptron.optim.build import build_optimizer
from steptron.parallel.finalize import finalize_gradients
from steptron.parallel.gradient_buffer import DataParallel
from steptron.parallel.gradient_norm import clip_gradients, gradient_norm
from steptron.parallel.mesh import Mesh
from steptron.parallel.stages import split_stages
from steptron.train.losses import TokenCounts, count_tokens, loss_coefficients, mtp_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NonFiniteError(Exception):
    """The loss or a gradient is NaN or infinite; parameters are as they were before the step."""


@dataclass(frozen=True)
class Losses:
    """Mean losses over a global batch, per token with a target, in nats.

    Attributes:
        lm: main head.
        mtp: MTP depths that run.
        ep: EP-group balance loss, mean over MoE layers (1 at balance); NaN where it is not measured.
        total: the training objective.
    """

    lm: float
    mtp: tuple[float, ...]
    ep: float
    total: float


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        losses: before the update.
        gradient_norm: global norm before clipping.
        counts: tokens of the global batch.
        tokens_per_expert_LE: int64 [MoE layers, E], selections over the global batch.
        confidence: mean share of router probability on the selected experts.
        stop_requested: some process was asked to stop.
    """

    losses: Losses
    gradient_norm: float
    counts: TokenCounts
    tokens_per_expert_LE: torch.Tensor
    confidence: float
    stop_requested: bool


class TrainStep:
    """Model, gradient buffers and optimizer of this process.

    Args:
        config: the whole configuration, already checked.
        mesh: the process groups.
        device: where parameters live.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, device: torch.device) -> None:
        self.config = config
        self.mesh = mesh
        self.device = device
        self.spec: ModelSpec = model_spec(config.model)
        self.engine_config = transformer_config(
            config.model, config.parallel, DTYPES[config.train.precision], deterministic=config.train.deterministic
        )
        stage = split_stages(config.model.num_layers, config.parallel.pipeline)[mesh.pipeline_rank]
        with torch.device(device):
            self.module = StepModel(
                self.spec,
                stage,
                self.engine_config,
                mesh.groups,
                mtp_depths=config.loss.mtp_train_depths,
                freeze_router=config.balance.freeze_router,
            )
        initialise(
            dict(self.module.logical_tensors()),
            self.spec,
            config.model.init,
            config.train.seed,
            mesh.expert_range(config.model.moe.num_experts),
        )
        self.model = DataParallel(self.module, mesh.groups.dp_cp, mesh.groups.expt_dp)
        self.optimizer = build_optimizer(config.optimizer, self.trained_parameters())
        self._moe_index = {layer.index: i for i, layer in enumerate(self.spec.moe_layers)}
        self._forward_backward = get_forward_backward_func()
        self.engine_config.no_sync_func = self.model.no_sync
        self.engine_config.finalize_model_grads_func = finalize_gradients

    def trained_parameters(self) -> list[NamedParameter]:
        """This process's parameters that get gradients."""
        tensors = dict(self.module.named_parameters())
        return [
            NamedParameter(parameter, tensors[parameter.name])
            for parameter in self.spec.parameters()
            if parameter.name in tensors and tensors[parameter.name].requires_grad
        ]

    def accumulate_gradients(self, batches: Sequence[MicroBatch]) -> tuple[Losses, _Observed]:
        """Forward and backward over this rank's micro-batches; leaves reduced gradients in ``main_grad``.

        Args:
            batches: this data-parallel rank's micro-batches, as many as on every other rank.
        """
        counts = count_tokens(batches, self.config.loss.mtp_train_depths, self.mesh.groups.dp_cp)
        contexts = [self._balance_context(batch, counts) for batch in batches]
        self.model.zero_grad_buffer()
        self.model.train()
        sums = self._run(list(zip(batches, contexts, strict=True)), counts, forward_only=False)
        observed = self._observe(contexts, counts)
        return self._losses(sums, counts, observed.ep_loss), observed

    def run(
        self, batches: Sequence[MicroBatch], lr: float, bias_rate: float, stop_requested: bool = False
    ) -> StepResult:
        """One optimizer step.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; nothing has been updated.
        """
        losses, observed = self.accumulate_gradients(batches)
        norm = gradient_norm(self.model, self.mesh)
        if not (math.isfinite(losses.total) and math.isfinite(norm)):
            raise NonFiniteError(self._describe_non_finite(losses, norm))
        if self.config.optimizer.clip_grad_norm:
            clip_gradients(self.model, norm, self.config.optimizer.clip_grad_norm)
        self.optimizer.step(lr)
        if not self.config.balance.freeze_router:
            self._update_biases(observed.tokens_per_expert_LE, bias_rate)
        return StepResult(
            losses,
            norm,
            observed.counts,
            observed.tokens_per_expert_LE,
            observed.confidence,
            self._any_rank(stop_requested),
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, TokenCounts]:
        """Summed cross entropies [1 + depths] (float64, nats) over the global batch, and its counts."""
        counts = count_tokens(batches, self.config.loss.mtp_train_depths, self.mesh.groups.dp_cp)
        self.model.eval()
        return self._run([(batch, None) for batch in batches], counts, forward_only=True), counts

    def _balance_context(self, batch: MicroBatch, counts: TokenCounts) -> BalanceContext:
        valid = batch.documents_BS.t().flatten() >= 0
        num_valid = int(valid.sum())
        balance = self.config.balance
        return BalanceContext(
            num_groups=balance.ep_groups or self.config.parallel.expert,
            coefficient=balance.ep_loss_coefficient * num_valid / max(counts.valid, 1),
            valid_T=None if num_valid == valid.numel() else valid,
            num_valid=num_valid,
        )

    def _run(
        self,
        work: list[tuple[MicroBatch, BalanceContext | None]],
        counts: TokenCounts,
        forward_only: bool,
    ) -> torch.Tensor:
        """Drives Megatron's schedule; returns globally summed cross entropies, float64, on every rank."""
        coefficients = torch.tensor(loss_coefficients(self.config.loss, counts), device=self.device)

        def combine(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = torch.dot(sums, coefficients.to(sums.dtype))
            return total, torch.tensor(0, dtype=torch.int), sums.detach().double()

        def forward(
            iterator: Iterator[tuple[MicroBatch, BalanceContext | None]], model: DataParallel
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            batch, balance = next(iterator)
            return model(batch, balance), partial(combine)

        batch_size, sequence_length = work[0][0].tokens_BS.shape
        outputs = self._forward_backward(
            forward_step_func=forward,
            data_iterator=iter(work),
            model=self.model,
            num_microbatches=len(work),
            seq_length=sequence_length,
            micro_batch_size=batch_size,
            forward_only=forward_only,
        )
        sums = torch.zeros(1 + self.config.loss.mtp_train_depths, dtype=torch.float64, device=self.device)
        for output in outputs:
            sums += output
        dist.all_reduce(sums)
        return sums

    def _observe(self, contexts: list[BalanceContext], counts: TokenCounts) -> _Observed:
        """Adds up what the MoE layers of all micro-batches, ranks and stages recorded."""
        num_layers, num_experts = len(self._moe_index), self.config.model.moe.num_experts
        tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=self.device)
        means = torch.zeros(2, dtype=torch.float64, device=self.device)
        for context in contexts:
            share = context.num_valid / max(counts.valid, 1) / max(num_layers, 1)
            for index, layer in context.layers.items():
                tokens[self._moe_index[index]] += layer.tokens_per_expert_E
                means += share * torch.stack([layer.ep_loss, layer.confidence]).double()
        dist.all_reduce(tokens)
        dist.all_reduce(means)
        ep_loss, confidence = means.tolist()
        return _Observed(counts, tokens, ep_loss, confidence)

    def _losses(self, sums: torch.Tensor, counts: TokenCounts, ep_loss: float) -> Losses:
        lm, *mtp = [total / max(count, 1) for total, count in zip(sums.tolist(), counts.targets, strict=True)]
        weighted = sum(w * loss for w, loss in zip(mtp_weights(self.config.loss, len(mtp)), mtp, strict=True))
        balance = self.config.balance.ep_loss_coefficient * ep_loss * len(self._moe_index)
        return Losses(lm, tuple(mtp), ep_loss, lm + weighted + balance)

    @torch.no_grad()
    def _update_biases(self, tokens_per_expert_LE: torch.Tensor, rate: float) -> None:
        for index, router in self.module.routers().items():
            router.bias += bias_update(tokens_per_expert_LE[self._moe_index[index]], rate)

    def _any_rank(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def _describe_non_finite(self, losses: Losses, norm: float) -> str:
        """Names the parameters with non-finite gradients, gathered from all ranks."""
        bad = [p.spec.name for p in self.trained_parameters() if not p.tensor.main_grad.isfinite().all()]  # type: ignore[attr-defined]
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, bad)
        names = sorted({name for part in gathered for name in part})
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return (
            f"loss {losses.total} (main {losses.lm}, MTP {list(losses.mtp)}, balance {losses.ep}), "
            f"gradient norm {norm}. Parameters with non-finite gradients: {shown or 'none'}. "
            "Nothing was updated in this step, and the last checkpoint is as it was."
        )


@dataclass(frozen=True)
class _Observed:
    counts: TokenCounts
    tokens_per_expert_LE: torch.Tensor
    ep_loss: float
    confidence: float
