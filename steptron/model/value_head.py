"""The value head: one number for each token from the trunk's hidden states, the output of an actor-critic's critic."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from steptron.model.transformer_config import StepConfig


class ValueHead(MegatronModule):
    """V(s) = w . h, with h the normed hidden state that the output matrix reads too. It has no bias, like every
    projection of this model.

    Every tensor-parallel rank holds it whole and applies it to its own tokens. The weight has the model's dtype; the
    product is computed in fp32, for values are regression targets that bf16 would round to three digits.

    Initial values: standard deviation 1e-5 (``model.init.value_head_std``), so that all values start near 0. The Step
    3.5 Flash report (section 5.2) leaves the critic's architecture open; this one, a trunk that starts from the
    policy's with a scalar head drawn so, is that of StepFun's open trainer.
    """

    def __init__(self, hidden_size: int, config: StepConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=config.params_dtype))

    def forward(self, normed_SBH: torch.Tensor) -> torch.Tensor:
        """[S, B, H] in the model's dtype -> [S, B] in fp32."""
        return torch.nn.functional.linear(normed_SBH.float(), self.weight.float()).squeeze(-1)
