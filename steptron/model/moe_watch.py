"""What MoE layers are seen to do in a micro-batch: how large experts' activations are, and where tokens go."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steptron.model.experts import ExpertRows, GroupedExperts
from steptron_kernels.experts.plain import grouped_linear


@dataclass
class MoeWatch:
    """What this rank saw of one micro-batch, by layer; tensors are on the device and detached.

    Layers store under their index: running a layer again (recomputation) stores the same values again, so that nothing
    is counted twice.

    Attributes:
        num_groups: G, groups of consecutive experts.
        with_alignment: whether experts' alignment is looked at, for which gate and up are computed a second time.
        probability: fp32 [E], router probability of every expert, mean over this rank's tokens.
        confidence: scalar, router probability of a token's selected experts together, mean over this rank's tokens.
        group_share: fp32 [G], selections of each group of experts over the mean of the groups, of all tokens of the
            micro-batch: G f_g of the balance loss.
        tokens: fp32 [local E], rows that each of this rank's experts has got.
        load: scalar, all of them over the mean of the expert-parallel ranks.
        intermediate_norm: fp32 [2, local E], root mean square and maximum over an expert's rows of ||h||_2 of the
            intermediate, before the routing weight; NaN without a row, infinite where a row is not finite.
        output_norm: fp32 [2, local E], likewise of the output.
        alignment: fp32 [local E], mean over an expert's rows of ||silu(g) * u|| / (||silu(g)|| ||u||), unclamped.

    Padding tokens count for nothing on the routers' side, and as rows like others on the experts'. Rows whose routing
    weight is exactly 0 count in no norm.
    """

    num_groups: int
    with_alignment: bool = False
    probability: dict[int, Tensor] = field(default_factory=dict)
    confidence: dict[int, Tensor] = field(default_factory=dict)
    group_share: dict[int, Tensor] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    load: dict[int, Tensor] = field(default_factory=dict)
    intermediate_norm: dict[int, Tensor] = field(default_factory=dict)
    output_norm: dict[int, Tensor] = field(default_factory=dict)
    alignment: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def routed(
        self,
        layer: int,
        probabilities_TE: Tensor,
        selected_T: Tensor,
        share_G: Tensor,
        valid_T: Tensor | None,
    ) -> None:
        """What a router decided.

        Args:
            layer: its index.
            probabilities_TE: [T, E], rows sum to 1.
            selected_T: [T], those of the selected experts together.
            share_G: [G], f_g of the balance loss: share of each group in the selections.
            valid_T: bool [T], false on padding; None: no padding.
        """
        if valid_T is None:
            self.probability[layer] = probabilities_TE.mean(dim=0)
            self.confidence[layer] = selected_T.mean()
        else:
            valid = valid_T.to(probabilities_TE.dtype)
            self.probability[layer] = valid @ probabilities_TE / valid.sum()
            self.confidence[layer] = torch.dot(valid, selected_T) / valid.sum()
        self.group_share[layer] = share_G * self.num_groups

    def experts(self, layer: int, experts: GroupedExperts, mean_rows: int) -> ExpertRows:
        """What takes the rows of this rank's experts.

        Args:
            layer: index of the layer.
            experts: this rank's.
            mean_rows: rows that an expert-parallel rank gets on average: what each of them sends.
        """

        @torch.no_grad()
        def look(x_NH: Tensor | None, tokens_per_expert_E: Tensor, squared_norms_N2: Tensor) -> None:
            counts_E = tokens_per_expert_E.to(squared_norms_N2.device)
            self.tokens[layer] = counts_E.to(torch.float32)
            self.load[layer] = self.tokens[layer].sum() / mean_rows
            rms_E2, largest_E2 = _norms(squared_norms_N2, counts_E)
            self.intermediate_norm[layer] = torch.stack([rms_E2[:, 0], largest_E2[:, 0]])
            self.output_norm[layer] = torch.stack([rms_E2[:, 1], largest_E2[:, 1]])
            if x_NH is not None:
                self.alignment[layer] = _alignment(experts, x_NH, tokens_per_expert_E)

        return ExpertRows(look, wants_inputs=self.with_alignment)


def _norms(squared_norms_N2: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean squares and maxima [E, 2] over each expert's rows, without negative ones; infinite where one is NaN."""
    unmeasured = squared_norms_N2 < 0
    squares_N2 = squared_norms_N2.masked_fill(unmeasured, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    measured_E2 = counts_E[:, None] - _by_expert("sum", unmeasured.to(squares_N2.dtype), counts_E)
    rms_E2 = (_by_expert("sum", squares_N2, counts_E) / measured_E2).sqrt()
    largest_E2 = _by_expert("max", squares_N2, counts_E).sqrt()
    return rms_E2, largest_E2.masked_fill(measured_E2 == 0, torch.nan)


def _by_expert(reduction: str, values: Tensor, counts_E: Tensor) -> Tensor:
    """Reduces consecutive rows to one an expert; 0 without a row."""
    return torch.segment_reduce(values, reduction, lengths=counts_E, initial=0.0, unsafe=True)


def _alignment(experts: GroupedExperts, x_NH: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Facts of Step 3.5 Flash, appendix: an expert is aligned where the norm of its product is that of its factors'."""
    gate, up = grouped_linear(x_NH, experts.gate_up_projection, tokens_per_expert_E).float().chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    norms = [torch.linalg.vector_norm(value, dim=-1) for value in (silu * up, silu, up)]
    ratios_N = norms[0] / (norms[1] * norms[2])
    counts_E = tokens_per_expert_E.to(x_NH.device)
    defined_N = ratios_N.isfinite()
    sums_E = _by_expert("sum", ratios_N.masked_fill(~defined_N, 0.0), counts_E)
    return sums_E / _by_expert("sum", defined_N.to(ratios_N.dtype), counts_E)
