"""One optimizer step, and one evaluation, of the model on this process's place in the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from steptron.checkpoint.weights import Weights
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.errors import some_of
from steptron.model.balance import BalanceContext, bias_update
from steptron.model.chunks import ModelChunks, build_chunks
from steptron.model.init import initialise
from steptron.model.kernels import choose_kernels
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.model.moe_watch import MoeWatch
from steptron.model.transformer_config import DTYPES, transformer_config
from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.build import build_optimizer
from steptron.parallel.gradient_norm import clip_gradients, gradient_norm
from steptron.parallel.mesh import Mesh
from steptron.parallel.sequence_shard import SequenceShard
from steptron.parallel.sharded_model import DataParallel, ShardedModel, buffer_plans
from steptron.platform.distributed import gather_to_all
from steptron.train.clipping import WeightClipping
from steptron.train.losses import TokenCounts, count_tokens, loss_coefficients
from steptron_kernels.polar_express.choose import choose

if TYPE_CHECKING:
    from steptron.telemetry.stopwatch import Stopwatch


@dataclass(frozen=True)
class Flags:
    """What a process tells the others along with a step's sums.

    Attributes:
        stop_requested: it was asked to stop.
        save_written: it has written its part of a checkpoint.
        save_requested: it was asked for a checkpoint.
    """

    stop_requested: bool = False
    save_written: bool = False
    save_requested: bool = False


class RejectedStep(Exception):
    """A step was not made: parameters are as they were before it. Raised on every rank, with the same message.

    Attributes:
        observed: what the forward passes showed.
    """

    def __init__(self, reason: str, observed: Observation) -> None:
        super().__init__(reason)
        self.observed = observed


class NonFiniteError(RejectedStep):
    """The loss or a gradient is NaN or infinite, or an update was in the step before."""


@dataclass(frozen=True)
class Losses:
    """Mean losses over a global batch, per token with a target, in nats.

    Attributes:
        lm: main head; NaN without a target in the whole batch.
        mtp: MTP depths that run; likewise.
        ep: EP-group balance loss, mean over MoE layers (1 at balance); None without MoE layers.
        total: the training objective.
    """

    lm: float
    mtp: tuple[float, ...]
    ep: float | None
    total: float


@dataclass(frozen=True)
class Observation:
    """What the forward passes over a global batch showed; the same on every rank.

    Attributes:
        losses: mean losses.
        counts: tokens of the global batch.
        tokens_per_expert_LE: int64 [MoE layers, E], selections over the global batch.
        confidence: share of router probability on the selected experts, mean over tokens and MoE layers; None
            without MoE layers.
        stop_requested: some process was asked to stop.
        all_written: every process has written its part of a checkpoint.
        save_requested: some process was asked for a checkpoint.
    """

    losses: Losses
    counts: TokenCounts
    tokens_per_expert_LE: torch.Tensor
    confidence: float | None
    stop_requested: bool
    all_written: bool
    save_requested: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step did: what was seen before the update, and the global gradient norm before clipping."""

    observed: Observation
    gradient_norm: float


class StepProbes(Protocol):
    """Looks at a step."""

    def watch(self, micro_batches: int) -> Sequence[MoeWatch | None]:
        """What looks at each micro-batch."""

    def before_update(self, lr: float) -> None:
        """The step is accepted, and gradients are as the optimizer gets them."""

    def after_update(self) -> None:
        """The optimizer has made its update."""


_NO_FLAGS = Flags()


class TrainStep:
    """Model chunks, gradient buffers and optimizer of this process.

    After a step updated parameters may still be on their way from their owners; they are waited for where the next
    forward pass needs them, and by whoever asks for ``chunks``.

    Args:
        config: the whole configuration, already checked.
        mesh: the process groups.
        device: where parameters live.
        initial: weights to start from; drawn at random when None.
        before_buffers: called with the model and the plans of its buffers, before gradients and optimizer state get
            memory.
        stopwatch: times attention; None: nothing does.

    Attributes:
        weight_clipping: watches the experts' outputs; None where ``optimizer.weight_clipping`` is off.
        probes: look at a step while they are set.
    """

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        device: torch.device,
        initial: Weights | None = None,
        before_buffers: Callable[[ModelChunks, Sequence[BufferPlan]], object] | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.probes: StepProbes | None = None
        self.config = config
        self.mesh = mesh
        self.device = device
        self.spec: ModelSpec = model_spec(config.model, config.train.recompute)
        self.kernels = choose_kernels(config.train, config.parallel, device)
        if stopwatch is not None:
            self.kernels = replace(self.kernels, attention=stopwatch.timing(self.kernels.attention))
        self.engine_config = transformer_config(
            config.model,
            config.parallel,
            DTYPES[config.train.precision],
            deterministic=config.train.deterministic,
            kernels=self.kernels,
        )
        with torch.device(device):
            chunks = build_chunks(config, self.spec, self.engine_config, mesh)
        tensors = dict(chunks.logical_tensors())
        # Before the optimizer, whose fp32 weights start from these.
        if initial is None:
            initialise(tensors, self.spec, config.model.init, config.train.seed, mesh.place)
        else:
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.zero_()  # what fills a vocabulary up is not stored
            initial.load_into(chunks, mesh)
        self._chunks = chunks
        plans = buffer_plans(chunks, config.optimizer, mesh)
        if before_buffers is not None:
            before_buffers(chunks, plans)
        self.sharded = ShardedModel(chunks, plans, mesh)
        self.optimizer = build_optimizer(
            config.optimizer,
            self.sharded.owned,
            choose(device, native=config.train.kernels != "plain"),
            mesh.groups.tp,
            config.train.deterministic,
        )
        threshold = config.optimizer.weight_clipping.threshold
        self.weight_clipping: WeightClipping | None = None
        if threshold is not None:
            self.weight_clipping = WeightClipping(threshold, chunks, self.sharded, self.optimizer, mesh)
        # With one group the balance loss is constant and has no gradient: it is left out.
        self._ep_groups = config.balance.ep_groups or config.parallel.expert
        self._ep_coefficient = config.balance.ep_loss_coefficient if self._ep_groups > 1 else 0.0
        self._moe_index = {layer.index: i for i, layer in enumerate(self.spec.moe_layers)}
        self._forward_backward = get_forward_backward_func()
        self.engine_config.no_sync_func = self.sharded.no_sync
        self.engine_config.finalize_model_grads_func = self.sharded.finalize_gradients

    @property
    def chunks(self) -> ModelChunks:
        """The model, with all parameters up to date."""
        self.sharded.gather.wait()
        return self._chunks

    def accumulate_gradients(self, batches: Sequence[MicroBatch], flags: Flags = _NO_FLAGS) -> Observation:
        """Forward and backward over this rank's micro-batches; leaves reduced gradients with their owners.

        Args:
            batches: this data-parallel rank's micro-batches, as many as on every other rank.
            flags: of this process; handed on to every rank.
        """
        counts = count_tokens(batches, self.config.loss.mtp_train_depths, self.mesh.groups.dp)
        watches = [None] * len(batches) if self.probes is None else self.probes.watch(len(batches))
        contexts = [
            self._balance_context(batch, num_valid, counts, watch)
            for batch, num_valid, watch in zip(batches, counts.local_valid, watches, strict=True)
        ]
        self.sharded.gradients.zero()
        self._chunks.train()
        sums = self._run(list(zip(batches, contexts, strict=True)), counts, forward_only=False)
        return self._observe(sums, contexts, counts, flags)

    def run(
        self,
        batches: Sequence[MicroBatch],
        lr: float,
        bias_rate: float,
        flags: Flags = _NO_FLAGS,
        judge: Callable[[float], str | None] = lambda loss: None,
    ) -> StepResult:
        """One optimizer step.

        Args:
            batches: this data-parallel rank's micro-batches, as many as on every other rank.
            lr, bias_rate: rates of the optimizer and of the routers' selection biases.
            flags: of this process; handed on to every rank.
            judge: given the main head's mean loss, says why there must be no update; every rank must decide alike.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; nothing has been updated. Raised on every rank.
            RejectedStep: ``judge`` has found a reason; likewise.
        """
        if self.weight_clipping is not None:
            self.weight_clipping.begin_step()
        observed = self.accumulate_gradients(batches, flags)
        try:
            norm = self._norm_of_accepted(observed, judge)
        except RejectedStep:
            if self.weight_clipping is not None:
                self.weight_clipping.drop_step()
            raise
        if self.config.optimizer.clip_grad_norm:
            clip_gradients(self.sharded.owned, norm, self.config.optimizer.clip_grad_norm)
        if self.probes is not None:
            self.probes.before_update(lr)
        self.optimizer.step(lr)
        if self.probes is not None:
            self.probes.after_update()
        self.sharded.gather.start()
        if not self.config.optimizer.sharding.overlap_gather:
            self.sharded.gather.wait()
        if not self.config.balance.freeze_router:
            self._update_biases(observed.tokens_per_expert_LE, bias_rate)
        return StepResult(observed, norm)

    def _norm_of_accepted(self, observed: Observation, judge: Callable[[float], str | None]) -> float:
        """The gradients' norm; raises where there must be no update."""
        norm, num_non_finite = gradient_norm(self.sharded.owned, self.device, self.optimizer.num_non_finite())
        if num_non_finite:
            raise NonFiniteError(self._describe_bad_updates(), observed)
        if not (math.isfinite(observed.losses.total) and math.isfinite(norm)):
            raise NonFiniteError(self._describe_non_finite(observed.losses, norm), observed)
        if (reason := judge(observed.losses.lm)) is not None:
            raise RejectedStep(f"{reason}. Nothing was updated in this step", observed)
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, TokenCounts]:
        """Summed cross entropies [1 + depths] (float64, nats) over the global batch, and its counts."""
        counts = count_tokens(batches, self.config.loss.mtp_train_depths, self.mesh.groups.dp)
        self._chunks.train(False)
        sums = self._run([(batch, None) for batch in batches], counts, forward_only=True)
        return self.mesh.add_up(sums), counts

    def _balance_context(
        self, batch: MicroBatch, num_valid: int, counts: TokenCounts, watch: MoeWatch | None
    ) -> BalanceContext:
        return BalanceContext(
            num_groups=self._ep_groups,
            coefficient=self._ep_coefficient * num_valid / max(counts.valid, 1),
            valid_T=None if num_valid == batch.documents_BS.numel() else self._own_tokens(batch.documents_BS >= 0),
            num_valid=num_valid,
            group=self.mesh.groups.tp_cp,
            watch=watch,
        )

    def _own_tokens(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Of whole sequences the values [T] of this rank's tokens, in the order of its flattened hidden states."""
        mesh = self.mesh
        shard = SequenceShard.balanced(values_BS.shape[1], mesh.context_rank, mesh.context_size)
        return shard.take(values_BS).t().chunk(mesh.tensor_size)[mesh.tensor_rank].flatten()

    def _run(
        self,
        work: list[tuple[MicroBatch, BalanceContext | None]],
        counts: TokenCounts,
        forward_only: bool,
    ) -> torch.Tensor:
        """Drives Megatron's schedule.

        Returns:
            float64 [1 + depths]: cross entropies summed over this rank's micro-batches; zeros before the last
            stage, and where another tensor-parallel rank reports the same sums. They add up over all ranks.
        """
        coefficients = torch.tensor(loss_coefficients(self.config.loss, counts), device=self.device)

        def combine(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = torch.dot(sums, coefficients.to(sums.dtype))
            return total, torch.tensor(0, dtype=torch.int), sums.detach().double()

        def forward(
            iterator: Iterator[tuple[MicroBatch, BalanceContext | None]], model: DataParallel
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            batch, balance = next(iterator)
            return model(batch, balance), combine

        batch_size, sequence_length = work[0][0].tokens_BS.shape
        outputs = self._forward_backward(
            forward_step_func=forward,
            data_iterator=[iter(work) for _ in self.sharded.chunks],
            model=self.sharded.chunks,
            num_microbatches=len(work),
            seq_length=sequence_length,
            micro_batch_size=batch_size,
            forward_only=forward_only,
        )
        sums = torch.zeros(1 + self.config.loss.mtp_train_depths, dtype=torch.float64, device=self.device)
        if self.mesh.tensor_rank == 0:
            for output in outputs:
                sums += output
        return sums

    def _observe(
        self, sums: torch.Tensor, contexts: list[BalanceContext], counts: TokenCounts, flags: Flags
    ) -> Observation:
        """Adds up what the micro-batches of all ranks and stages showed."""
        num_layers = len(self._moe_index)
        tokens_LE = torch.zeros(num_layers, self.config.model.moe.num_experts, dtype=torch.int64, device=self.device)
        means = torch.zeros(2, dtype=torch.float64, device=self.device)
        for context in contexts:
            share = context.num_valid / max(counts.valid, 1) / max(num_layers, 1)
            for index, layer in context.layers.items():
                tokens_LE[self._moe_index[index]] += layer.tokens_per_expert_E
                means += share * torch.stack([layer.ep_loss, layer.confidence]).double()
        if self.mesh.groups.tp_cp.rank() > 0:
            means[0] = 0.0  # the loss of a micro-batch is the same on all its ranks: the first reports it
        self.mesh.add_up(tokens_LE)
        told = means.new_tensor([flags.stop_requested, flags.save_written, flags.save_requested])
        *totals, ep_loss, confidence, stops, written, saves = self.mesh.add_up(torch.cat([sums, means, told])).tolist()
        return Observation(
            self._losses(totals, counts, ep_loss if num_layers else None),
            counts,
            tokens_LE,
            confidence if num_layers else None,
            stop_requested=stops > 0,
            all_written=written == dist.get_world_size(),
            save_requested=saves > 0,
        )

    def _losses(self, sums: list[float], counts: TokenCounts, ep_loss: float | None) -> Losses:
        coefficients = loss_coefficients(self.config.loss, counts)
        total = sum(c * value for c, value in zip(coefficients, sums, strict=True))
        total += self._ep_coefficient * (ep_loss or 0.0) * len(self._moe_index)
        lm, *mtp = [value / count if count else math.nan for value, count in zip(sums, counts.targets, strict=True)]
        return Losses(lm, tuple(mtp), ep_loss, total)

    @torch.no_grad()
    def parameters_are_finite(self) -> bool:
        """Whether every parameter of every rank is finite."""
        bad = torch.zeros((), device=self.device)
        for _, parameter in self.chunks.named_parameters():
            bad += ~parameter.isfinite().all()
        bad += self.optimizer.num_non_finite().to(bad)
        dist.all_reduce(bad)
        return not bool(bad)

    def describe_non_finite_parameters(self) -> str:
        """Names of the parameters of all ranks that are not finite. Every rank must call it."""
        bad = [name for name, parameter in self.chunks.named_parameters() if not parameter.isfinite().all()]
        return _of_all_ranks(bad + self.optimizer.non_finite())

    @torch.no_grad()
    def _update_biases(self, tokens_per_expert_LE: torch.Tensor, rate: float) -> None:
        for index, router in self._chunks.routers().items():
            router.bias += bias_update(tokens_per_expert_LE[self._moe_index[index]], rate)

    def _describe_non_finite(self, losses: Losses, norm: float) -> str:
        """Names the parameters with non-finite gradients, gathered from all ranks."""
        bad = [piece.name for piece in self.sharded.owned if not piece.gradient.isfinite().all()]
        shown = _of_all_ranks(bad)
        return (
            f"loss {losses.total} (main {losses.lm}, MTP {list(losses.mtp)}, balance {losses.ep}), "
            f"gradient norm {norm}. Parameters with non-finite gradients: {shown or 'none'}. "
            "Nothing was updated in this step, and the last checkpoint is as it was."
        )

    def _describe_bad_updates(self) -> str:
        """Names the matrices whose update of the step before was not finite."""
        return (
            f"the update of {_of_all_ranks(self.optimizer.non_finite())} was NaN or infinite in the step before, "
            "though gradients were finite: the momentum that the run resumed from was so already, or it has added up "
            "to more than float32 holds (clip gradients: optimizer.clip_grad_norm), or optimizer.muon.precision bf16 "
            "has overflowed. These matrices got no update in that step, others did; the last checkpoint is as it was"
        )


def _of_all_ranks(names: list[str]) -> str:
    """Names that any rank has, the first twenty written out."""
    return some_of(sorted({name for part in gather_to_all(names) for name in part}))
