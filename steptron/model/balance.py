"""Expert balance: the EP-group loss, expert counts, and the loss-free bias update.

Source: Step 3.5 Flash report, section 2.2 and appendices; choices that it leaves open are noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from steptron.model.moe_watch import MoeWatch
from steptron.model.router import Routing


@dataclass
class LayerBalance:
    """What one MoE layer saw in one micro-batch.

    Attributes:
        tokens_per_expert_E: int64 [E], selections of this rank's non-padding tokens.
        ep_loss: scalar, L_EP of the micro-batch (1 at balance), without gradient; the same on all its ranks.
        confidence: scalar, mean over the micro-batch's tokens of the selected experts' share of the scores, this
            rank's part of the sum.
    """

    tokens_per_expert_E: torch.Tensor
    ep_loss: torch.Tensor
    confidence: torch.Tensor


@dataclass
class BalanceContext:
    """Balance of one micro-batch, handed to every MoE layer.

    Layers store what they saw under their index; running a layer again (recomputation) stores the
    same values again, so nothing is counted twice.

    Attributes:
        num_groups: G of the EP-group loss.
        coefficient: weight of L_EP in the total loss, the micro-batch's share of the global batch's
            tokens included; 0 turns the loss off.
        valid_T: bool [T], false on padding, in the order of the flattened hidden states; None: no padding in the
            micro-batch.
        num_valid: non-padding tokens of the micro-batch, over all its ranks.
        group: the tensor x context ranks that share the tokens of the micro-batch; None: this rank has them all.
        watch: looks at what the layers do besides; None: nothing does.
    """

    num_groups: int
    coefficient: float
    valid_T: torch.Tensor | None
    num_valid: int
    group: dist.ProcessGroup | None = None
    watch: MoeWatch | None = None
    layers: dict[int, LayerBalance] = field(default_factory=dict)

    def observe(self, layer_index: int, routing: Routing) -> torch.Tensor:
        """Records a layer's routing and returns its weighted balance loss (differentiable)."""
        tokens_per_expert_E = routing.tokens_per_expert(self.valid_T)
        probabilities_TE = routing.scores_TE / (routing.scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        groups = group_terms(
            probabilities_TE, tokens_per_expert_E, self.num_groups, self.valid_T, self.num_valid, self.group
        )
        loss = groups.loss
        with torch.no_grad():
            selected_T = probabilities_TE.gather(1, routing.experts_TK).sum(dim=-1)
            confidence = _masked_mean(selected_T, self.valid_T, self.num_valid)
            if self.watch is not None:
                self.watch.routed(layer_index, probabilities_TE, selected_T, groups.f_G, self.valid_T)
        self.layers[layer_index] = LayerBalance(tokens_per_expert_E, loss.detach(), confidence)
        return self.coefficient * loss


def ep_group_loss(
    probabilities_TE: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    num_groups: int,
    valid_T: torch.Tensor | None,
    num_valid: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """L_EP = G * sum over groups g of f_g p_g, for one micro-batch.

    p_g and f_g are the probability mass and the share of selections of the experts of group g
    (consecutive experts, E/G each), over non-padding tokens; both sum to 1, so that L_EP = 1 at
    balance. The gradient flows through p alone. Report, section 2.2; normalising sigmoid scores to
    probabilities over all experts is our choice.

    Args:
        probabilities_TE: [T, E], rows sum to 1.
        tokens_per_expert_E: int64 [E], selections of non-padding tokens.
        num_groups: G.
        valid_T: bool [T], false on padding; None: no padding.
        num_valid: non-padding tokens of the micro-batch.
        group: ranks that share the micro-batch, T tokens each. All get the loss of the whole micro-batch; the
            gradient of each reaches its own tokens.
    """
    return group_terms(probabilities_TE, tokens_per_expert_E, num_groups, valid_T, num_valid, group).loss


class GroupTerms(NamedTuple):
    """The factors [G] of the balance loss: p_g with, f_g without gradient."""

    p_G: torch.Tensor
    f_G: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """G * sum of f_g p_g; scalar."""
        return len(self.p_G) * torch.dot(self.f_G, self.p_G)


def group_terms(
    probabilities_TE: torch.Tensor,
    tokens_per_expert_E: torch.Tensor,
    num_groups: int,
    valid_T: torch.Tensor | None,
    num_valid: int,
    group: dist.ProcessGroup | None = None,
) -> GroupTerms:
    """What :func:`ep_group_loss` is the product of; same arguments."""
    counts_G = tokens_per_expert_E.view(num_groups, -1).sum(dim=1).to(probabilities_TE.dtype)
    p_G = _masked_mean(probabilities_TE, valid_T, num_valid).view(num_groups, -1).sum(dim=1)
    if group is not None and group.size() > 1:
        # In one message: counts of a micro-batch are far below 2^24 and exact in float32.
        p_G, counts_G = _AddUp.apply(torch.stack([p_G, counts_G]), group)
    f_G = counts_G / counts_G.sum().clamp(min=1)
    return GroupTerms(p_G, f_G.detach())


class _AddUp(torch.autograd.Function):
    """Sum over ranks, of which each rank's own addend gets the gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, values: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _masked_mean(values: torch.Tensor, valid_T: torch.Tensor | None, num_valid: int) -> torch.Tensor:
    """Mean over the non-padding tokens (axis 0)."""
    if valid_T is not None:
        values = values * valid_T.to(values.dtype).view(-1, *([1] * (values.dim() - 1)))
    return values.sum(dim=0) / max(num_valid, 1)


class AttachLoss(torch.autograd.Function):
    """Passes a tensor through and lets a loss take part in the backward pass.

    A pipeline stage hands on only its hidden states; a loss of its own reaches the backward pass
    by hanging on them.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0], torch.ones_like(loss)


def bias_update(tokens_per_expert_E: torch.Tensor, rate: float) -> torch.Tensor:
    """Change of the selection bias after a global batch: u * sign(mean count - count).

    Computed as sign(total - E * count) in int64, which is exact under any layout.

    Args:
        tokens_per_expert_E: int64 [..., E], counts over the global batch.

    Returns:
        fp32 [..., E]
    """
    total = tokens_per_expert_E.sum(dim=-1, keepdim=True)
    difference = total - tokens_per_expert_E.shape[-1] * tokens_per_expert_E
    return rate * difference.sign().to(torch.float32)
