"""A corpus with a few bi-grams that come again and again."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

LETTERS = "bcdfghjklmnprstvwz"
DRAWS = 500  # of a document: a draw gives a word, or both words of a planted bi-gram


def write_corpus(path: Path, num_words: int, pairs: int, rate: float, seed: int = 1) -> None:
    """Writes JSONL whose words are two letters long, each a token of a byte-level BPE of 512.

    Most words are a Markov chain: each has an order of its own of what follows it, drawn with weight 1 / rank. With
    probability ``rate`` a planted bi-gram is put in instead, drawn with weight 1 / rank too, after which the chain goes
    on as if it had not been there. Its two words occur nowhere else: the second is certain, and the first tells
    nothing of what comes after.

    Args:
        num_words: at least so many are written.
        pairs: planted bi-grams.
        rate: of draws; of all words 2 rate / (1 + rate) are then planted.
        seed: of everything.
    """
    chance = random.Random(seed)
    words = [consonant + vowel for consonant in LETTERS for vowel in "aeiou"]
    chance.shuffle(words)
    planted = [(words.pop(), words.pop()) for _ in range(pairs)]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    weights_of_pairs = list(accumulate(1 / rank for rank in range(1, pairs + 1)))
    followers = {word: chance.sample(words, len(words)) for word in words}
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_words:
            word = chance.choice(words)
            document = [word]
            for _ in range(DRAWS):
                if chance.random() < rate:
                    document += chance.choices(planted, cum_weights=weights_of_pairs)[0]
                else:
                    word = chance.choices(followers[word], cum_weights=weights)[0]
                    document.append(word)
            # With the blank every word is written alike, the first too.
            file.write(json.dumps({"text": " " + " ".join(document)}) + "\n")
            written += len(document)
