"""The trained model on new tokens of many sequences, whose earlier tokens are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steptron.engine.cache import Blocks, LayerGroup
from steptron.engine.context import Step, Work
from steptron.engine.sampling import DRAFT, Draft, Sampling, draw, log_probabilities, uniform
from steptron.model.assembly import StepModel


@dataclass
class Drafting:
    """A sequence for which tokens are to be drafted.

    Attributes:
        blocks: what it holds in each group of layers.
        start: place from which on the MTP layers have not seen the sequence as it is.
        hidden_NH: the main model's hidden states of the N places from there to the last that it has computed.
        known: the N tokens that follow those places.
        sampling: how tokens are chosen.
        drafts: what was drafted.
    """

    blocks: Sequence[Blocks]
    start: int
    hidden_NH: Tensor
    known: list[int]
    sampling: Sampling
    drafts: list[Draft] = field(default_factory=list)

    def following(self, depth: int) -> list[int]:
        """The tokens that the MTP layer of a depth gets at its N places: known ones, then drafted ones."""
        tokens = [*self.known[depth:], *(draft.token for draft in self.drafts)]
        return tokens[: len(self.known)]


class Runner:
    """Runs a whole model, layer by layer as training does, but for attention, which reads the cache.

    Args:
        model: on one process, in evaluation mode.
        groups: its cache.
    """

    def __init__(self, model: StepModel, groups: Sequence[LayerGroup]) -> None:
        self.model = model
        self.groups = groups
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int], work: Sequence[Work]) -> Tensor:
        """Hidden states [T, H] of new tokens, before the final norm; their keys and values are cached.

        Args:
            tokens: of all sequences, one after the other.
            work: the sequences.
        """
        step = Step(self.groups, work, self.device)
        x_T1H = self._embedded(tokens)
        for name, layer in self.model.layers.items():
            x_T1H = layer(x_T1H, step.layer(f"layers.{name}"), None)
        return x_T1H[:, 0]

    @torch.no_grad()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The main head's logits [N, V], float32."""
        model = self.model
        return model.logits_of(model.final_norm(hidden_NH[:, None]), model.head.weight)[:, 0].float()

    @torch.no_grad()
    def draft(self, sequences: Sequence[Drafting], depths: int) -> None:
        """Drafts a token with each of the nearest MTP depths, and puts it into each sequence."""
        work = [Work(own.blocks, own.start, len(own.known)) for own in sequences]
        step = Step(self.groups, work, self.device)
        chained_T1H = torch.cat([own.hidden_NH for own in sequences])[:, None]
        if not self.model.running_depths()[0].spec.pre_norm_chain:
            chained_T1H = self.model.final_norm(chained_T1H)
        last_R = torch.tensor([own.count for own in work]).cumsum(0) - 1
        for k, depth in enumerate(self.model.running_depths()[:depths]):
            following = [token for own in sequences for token in own.following(k)]
            normed_T1H, chained_T1H = depth(self._embedded(following), chained_T1H, step.layer(f"mtp.{k}"))
            logits_RV = self.model.logits_of(normed_T1H[last_R.to(self.device)], self.model.mtp_head(k))[:, 0].float()
            log_p_RV = log_probabilities(logits_RV, [own.sampling for own in sequences])
            places = [own.start + len(own.known) + 1 + k for own in sequences]
            uniforms = [uniform(own.sampling.seed, place, DRAFT) for own, place in zip(sequences, places, strict=True)]
            tokens = draw(log_p_RV.exp(), uniforms)
            chosen = log_p_RV.gather(1, log_p_RV.new_tensor(tokens, dtype=torch.int64)[:, None])[:, 0].tolist()
            for own, token, log_q_V, log_q in zip(sequences, tokens, log_p_RV, chosen, strict=True):
                own.drafts.append(Draft(token, log_q_V, log_q))

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        """[T, 1, H]"""
        return self.model.embed(torch.tensor([tokens], device=self.device)).contiguous()
