"""How large the outputs of routed experts' projections get: of each projection the largest norm over its tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from steptron.model.chunks import ModelChunks
from steptron.model.experts import GroupedExperts
from steptron.model.layer_spec import ParameterRole
from steptron.model.moe import MoeFfn
from steptron_kernels.experts.plain import grouped_linear
from steptron_kernels.experts.plan import RowPlan
from steptron_kernels.swiglu.plain import swiglu

PROJECTIONS = (ParameterRole.EXPERT_GATE, ParameterRole.EXPERT_UP, ParameterRole.EXPERT_DOWN)
"""Their order in :attr:`OutputNorms.maxima`."""


class OutputNorms:
    """max_x ||W x|| of every gate, up and down projection of this rank's experts, over the tokens that they have had in
    training since the last :meth:`restart`.

    Before each forward pass of the experts their projections are computed a second time, in the dtype of the
    parameters; the model's own results and gradients do not change. x is what a projection is applied to in the model's
    formulas: for gate and up the token, for down the SwiGLU product, clipped where the layer clips it and without the
    routing weight. The outputs of gate are taken as they are, before SiLU. Padding tokens, which pre-training has
    none of, count like others. That a layer is computed again in the backward changes no maximum.

    Args:
        chunks: the model.

    Attributes:
        maxima: fp32 [experts of this rank, 3] by name of the experts' prefix, such as ``layers.3.ffn.experts``.
    """

    def __init__(self, chunks: ModelChunks) -> None:
        self.maxima: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        for chunk in chunks:
            for index, layer in chunk.layers.items():
                if isinstance(layer.ffn, MoeFfn):
                    self._watch(f"layers.{index}.ffn.experts", layer.ffn.experts)

    def restart(self) -> None:
        """Forgets the tokens so far."""
        for maximum_E3 in self.maxima.values():
            maximum_E3.zero_()
        self.keep()

    def keep(self) -> None:
        """Marks what :meth:`drop` goes back to."""
        self._kept = {name: maximum_E3.clone() for name, maximum_E3 in self.maxima.items()}

    def drop(self) -> None:
        """Forgets the tokens since :meth:`keep`."""
        for name, kept_E3 in self._kept.items():
            self.maxima[name].copy_(kept_E3)

    def combine(self, group: dist.ProcessGroup) -> None:
        """Takes in what the other ranks that hold the same experts have seen."""
        if group.size() > 1:
            for maximum_E3 in self.maxima.values():
                dist.all_reduce(maximum_E3, op=dist.ReduceOp.MAX, group=group)

    def _watch(self, name: str, experts: GroupedExperts) -> None:
        num_experts = experts.down_projection.shape[0]
        maximum_E3 = torch.zeros(num_experts, len(PROJECTIONS), device=experts.down_projection.device)
        self.maxima[name] = maximum_E3

        def look(experts: GroupedExperts, inputs: tuple[Any, ...]) -> None:
            if experts.training:
                x, tokens_per_expert_E, _, plan = inputs
                torch.maximum(maximum_E3, _largest_norms(experts, x, tokens_per_expert_E, plan), out=maximum_E3)

        experts.register_forward_pre_hook(look)


@torch.no_grad()
def _largest_norms(
    experts: GroupedExperts, x: torch.Tensor, tokens_per_expert_E: torch.Tensor, plan: RowPlan | None
) -> torch.Tensor:
    """fp32 [E, 3] over the rows of a forward pass; 0 for experts without any."""
    x_NH = x if plan is None else x.index_select(0, plan.token_N)
    gate_up = grouped_linear(x_NH, experts.gate_up_projection, tokens_per_expert_E)
    hidden = swiglu(gate_up, experts.spec.expert_clamp, experts.spec.clamp_after_silu)
    gate, up = gate_up.chunk(2, dim=-1)
    down = grouped_linear(hidden, experts.down_projection, tokens_per_expert_E)
    norms_N3 = torch.stack([torch.linalg.vector_norm(y, dim=-1, dtype=torch.float32) for y in (gate, up, down)], dim=-1)
    num_experts = tokens_per_expert_E.numel()
    expert_N = torch.repeat_interleave(
        torch.arange(num_experts, device=x.device), tokens_per_expert_E.to(x.device), output_size=x_NH.shape[0]
    )
    largest_E3 = norms_N3.new_zeros(num_experts, len(PROJECTIONS))
    return largest_E3.scatter_reduce_(0, expert_N[:, None].expand_as(norms_N3), norms_N3, "amax")
