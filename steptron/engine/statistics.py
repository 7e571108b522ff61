"""What an engine has done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts since the engine was made.

    Attributes:
        drafts: tokens that are drafted at once, at most.
        steps: that computed something.
        computed_tokens: of prompts, answers and drafts.
        generated_tokens: of answers.
        shared_tokens: of prompts that were cached already.
        preemptions: sequences that gave their blocks to older ones.
        weight_updates: how often new weights came.
        ended: answers by stop reason.
        drafted_D, accepted_D: tokens that each MTP depth has drafted, and those of them that were accepted.
    """

    drafts: int
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    weight_updates: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    drafted_D: list[int] = field(init=False)
    accepted_D: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.drafted_D, self.accepted_D = [0] * self.drafts, [0] * self.drafts

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Counts what has become of a sequence's drafts."""
        for depth in range(drafted):
            self.drafted_D[depth] += 1
            self.accepted_D[depth] += depth < accepted
