"""The router as torch operations: sigmoid scores, a selection bias, renormalised weights.

p = sigmoid(W h); S = top-k(p + b); w_e = scale * p_e / (sum over S of p + 1e-20). The bias never enters the weights
and gets no gradient. Released Step-3.5-Flash model, MoE gate; loss-free balancing as in arXiv 2408.15664.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(h_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Selects experts by score plus bias and weighs them by score alone.

    At least float32, whatever the dtype of the hidden states.

    Args:
        h_TH: [T, H] hidden states.
        weight_EH: [E, H] router matrix.
        bias_E: [E] selection bias.
        top_k: experts for each token.
        scaling: sum of a token's weights.

    Returns:
        experts_TK: int64 [T, K], selected experts in no particular order. Of experts that tie for the last place,
            ``torch.topk`` takes an unspecified one.
        weights_TK: [T, K], renormalised and scaled; differentiable.
        scores_TE: [T, E], sigmoid scores without the bias; differentiable.
    """
    dtype = torch.promote_types(h_TH.dtype, torch.float32)
    scores_TE = F.linear(h_TH.to(dtype), weight_EH.to(dtype)).sigmoid()
    with torch.no_grad():
        experts_TK = torch.topk(scores_TE + bias_E, top_k, dim=-1, sorted=False).indices
    selected_TK = scores_TE.gather(1, experts_TK)
    # The share first: its gradient is finite also where all scores underflow, that of scaling / (sum + 1e-20) is not.
    weights_TK = selected_TK / (selected_TK.sum(dim=-1, keepdim=True) + 1e-20) * scaling
    return experts_TK, weights_TK, scores_TE
