"""A planted benchmark: 200 questions of mathematics and programming, made by rule; and text around them."""

from __future__ import annotations

import random

_NAMES = ["Anna", "Béla", "Chidi", "Dana", "Émile", "Farah", "Goro", "Hana", "Iris", "João"]
_THINGS = ["apples", "fish", "flags", "marbles", "pencils", "coins", "files", "stamps", "books", "tiles"]
_PLACES = ["market", "office", "field", "library", "harbour"]
_TASKS = [
    ("returns the {n}th smallest value of a list", "raises an error if the list has fewer values"),
    ("counts the words of a text that are longer than {n} letters", "ignores case and punctuation"),
    ("splits a list into chunks of {n} items", "keeps the last chunk even if it is shorter"),
    ("finds every pair of numbers whose sum is {n}", "returns each pair only once, in ascending order"),
    ("rotates a matrix by {n} quarter turns", "leaves the matrix that was given unchanged"),
]


def _mathematics(number: int) -> str:
    name, other = _NAMES[number % 10], _NAMES[(number * 3 + 1) % 10]
    thing, place = _THINGS[number // 10], _PLACES[number % 5]
    return (
        f"{name} buys {number + 12} {thing} at the {place} for {number % 7 + 2}.50 euros each, gives "
        f"{number % 5 + 1} of the {thing} to {other}, and loses 1 on the way home. "
        f"How many {thing} does {name} still have afterwards?"
    )


def _programming(number: int) -> str:
    what, and_then = _TASKS[number % 5]
    name, thing = _NAMES[(number // 5) % 10], _THINGS[number // 10]
    what = what.format(n=number % 9 + 2)
    return (
        f"Write a function for {name}'s collection of {thing} that {what}, and that {and_then}; "
        f"for example, it should finish within {number + 1} seconds."
    )


QUESTIONS = [_mathematics(number) for number in range(100)] + [_programming(number) for number in range(100)]


def filler(seed: int, count: int) -> str:
    """Text of ``count`` words that has nothing to do with the questions."""
    source = random.Random(seed)
    syllables = ["ka", "lo", "mi", "nu", "re", "so", "ti", "va"]
    return " ".join("".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(count))
