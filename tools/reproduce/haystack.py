"""Documents of noise in which needles are hidden, and what is asked of them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

NOISE = "abcdefghijklmnopqrstuvwxyz"
CLASSES, VALUES = 4, 6
QUESTIONS = "0123"
"""A question for each class of needles; the needles of class c are the capital letters from 6 c on."""


@dataclass(frozen=True)
class Haystack:
    """A document: noise with a needle of each class, then each question with its answer, which is that needle.

    Attributes:
        text: one token a character.
        distances: for each question, how many tokens its needle lies before it.
        answers: places of the answers in the text.
    """

    text: str
    distances: tuple[int, ...]
    answers: tuple[int, ...]

    def masked_spans(self) -> list[list[int]]:
        """All but the answers: nothing else can be known."""
        borders = [0, *(place for answer in self.answers for place in (answer, answer + 1)), len(self.text)]
        return [[begin, end] for begin, end in zip(borders[::2], borders[1::2], strict=True) if begin < end]


def haystack(draw: random.Random, length: int) -> Haystack:
    """A document of so many tokens, its needles at any places."""
    noise = length - 2 * CLASSES
    text = draw.choices(NOISE, k=noise)
    places = draw.sample(range(noise), CLASSES)
    needles = [chr(ord("A") + kind * VALUES + draw.randrange(VALUES)) for kind in range(CLASSES)]
    for place, needle in zip(places, needles, strict=True):
        text[place] = needle
    distances, answers = [], []
    for kind in draw.sample(range(CLASSES), CLASSES):
        distances.append(len(text) - places[kind])
        text.append(QUESTIONS[kind])
        answers.append(len(text))
        text.append(needles[kind])
    return Haystack("".join(text), tuple(distances), tuple(answers))


def write_haystacks(path: Path, count: int, shortest: int, longest: int, seed: int) -> None:
    """Writes JSONL of documents of all lengths between two."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            made = haystack(draw, draw.randint(shortest, longest))
            file.write(json.dumps({"text": made.text, "masked_spans": made.masked_spans()}) + "\n")
