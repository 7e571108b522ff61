"""Rules: each measure against a slow plain computation, and the borders of each limit."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.errors import DataError
from steptron.data.filters.length import Length, LengthSettings
from steptron.data.filters.repetition import Repetition, RepetitionSettings, longest_stretch, ngram_shares, repeats
from steptron.data.filters.tags import Tags, TagsSettings
from tests.data.filters.documents import document

_WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "é"]), max_size=40)


def _plain_ngram_shares(words: list[str], size: int) -> tuple[float, float]:
    """Shares of characters in the most frequent n-gram and in repeats, by definition."""
    windows = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    counts = Counter(windows)
    if not windows or max(counts.values()) < 2:
        return 0.0, 0.0

    def share(starts: list[int]) -> float:
        covered = {place for start in starts for place in range(start, start + size)}
        return sum(len(words[place]) for place in covered) / sum(map(len, words))

    top = min(counts, key=lambda gram: (-counts[gram], -len("".join(gram)), windows.index(gram)))
    repeated = [start for start, window in enumerate(windows) if window in windows[:start]]
    return share([start for start, window in enumerate(windows) if window == top]), share(repeated)


@settings(max_examples=150, deadline=None)
@given(_WORDS)
def test_ngram_shares_equal_a_plain_computation(words: list[str]) -> None:
    sizes = [1, 2, 3, 5, 7]
    for shares in ngram_shares(words, sizes):
        assert (shares.top, shares.repeated) == pytest.approx(_plain_ngram_shares(words, shares.size)), shares.size


def _plain_longest_stretch(text: str, max_period: int) -> tuple[int, str]:
    best, pattern = 0, ""
    for period in range(1, max_period + 1):
        for start in range(len(text)):
            end = start + period
            while end < len(text) and text[end] == text[end - period]:
                end += 1
            if end - start >= 2 * period and end - start > best:
                best, pattern = end - start, text[start : start + period]
    return best, pattern


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab漢\n", max_size=40), st.integers(1, 6))
def test_the_longest_stretch_equals_a_plain_computation(text: str, max_period: int) -> None:
    assert longest_stretch(text, max_period) == _plain_longest_stretch(text, max_period)


def test_repeats_count_all_but_the_first_occurrence() -> None:
    measured = repeats(["aa", "b", "", "aa", "aa", ""])
    assert (measured.share, measured.character_share) == (2 / 4, 4 / 7)
    assert repeats(["", ""]).share == 0.0


_OFF: dict[str, object] = {
    "repeated_lines": None,
    "repeated_paragraphs": None,
    "repeated_line_characters": None,
    "repeated_paragraph_characters": None,
    "top_ngrams": {},
    "repeated_ngrams": {},
    "max_stretch": None,
    "min_words": 0,
}


@pytest.mark.parametrize(
    ("limits", "text", "value", "reason"),
    [
        # 10 lines, 3 of them repeats: the limit itself is kept, less of it is not.
        ({"repeated_lines": 0.3}, "\n".join("abcdefgaaa"), 0.3, "repeated_lines"),
        ({"repeated_line_characters": 0.3}, "\n".join("abcdefgaaa"), 0.3, "repeated_line_characters"),
        ({"repeated_paragraphs": 0.25}, "a\nb\n\nc\n \nd\n\na\nb", 0.25, "repeated_paragraphs"),
        ({"repeated_paragraph_characters": 0.375}, "a\nb\n\nc\n \nd\n\na\nb", 0.375, "repeated_paragraph_characters"),
        ({"top_ngrams": {2: 0.5}}, "a b c d a b e f", 0.5, "top_2_gram"),
        ({"repeated_ngrams": {2: 0.25}}, "a b c d a b e f", 0.25, "repeated_2_grams"),
        ({"max_stretch": 12}, "start" + "xyz" * 4 + "end", 12, "stretch"),
    ],
)
def test_the_border_of_each_measure(limits: dict[str, object], text: str, value: float, reason: str) -> None:
    def verdict(limits: dict[str, object]) -> tuple[str | None, float | None]:
        judged = Repetition(RepetitionSettings(**{**_OFF, **limits})).judge(document(text))  # type: ignore[arg-type]
        return judged.reason, judged.value

    def lowered(limit: object) -> object:
        if isinstance(limit, dict):
            return {size: share - 0.001 for size, share in limit.items()}
        return limit - 1 if isinstance(limit, int) else limit - 0.001  # type: ignore[operator]

    assert verdict(limits) == (None, None)
    assert verdict({name: lowered(limit) for name, limit in limits.items()}) == (reason, pytest.approx(value))


def test_the_published_thresholds_are_the_defaults() -> None:
    # Rae et al. 2021, table A1.
    chosen = RepetitionSettings()
    shares = (chosen.repeated_lines, chosen.repeated_paragraphs)
    assert (*shares, chosen.repeated_line_characters, chosen.repeated_paragraph_characters) == (0.3, 0.3, 0.2, 0.2)
    assert chosen.top_ngrams == {2: 0.20, 3: 0.18, 4: 0.16}
    assert chosen.repeated_ngrams == {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def test_a_removal_says_what_was_measured_and_where() -> None:
    text = "\n".join(["word " * 10] * 9)
    verdict = Repetition(RepetitionSettings()).judge(document("fine", text))
    assert verdict.detail == "messages.1.content: 0.89 of the lines are repeats (limit 0.3)"
    # Short passages are judged by their stretches only.
    assert Repetition(RepetitionSettings()).judge(document("yes yes yes yes\n" * 4)).keeps
    stretch = Repetition(RepetitionSettings()).judge(document("-" * 1001))
    assert stretch.detail == "1,001 characters are one stretch of '-' (limit 1,000)"
    assert Repetition(RepetitionSettings()).judge(document("-" * 1000)).keeps


@pytest.mark.parametrize(
    ("borders", "reason"),
    [
        ({"min_characters": 8, "max_characters": 8, "min_words": 3, "max_words": 3}, None),
        ({"min_characters": 9}, "few_characters"),
        ({"max_characters": 7}, "many_characters"),
        ({"min_words": 4}, "few_words"),
        ({"max_words": 2}, "many_words"),
    ],
)
def test_length_counts_all_passages(borders: dict[str, int], reason: str | None) -> None:
    verdict = Length(LengthSettings(**borders)).judge(document("ab 漢", " cde"))  # type: ignore[arg-type]
    assert verdict.reason == reason


def test_a_lower_border_above_the_upper_one_is_refused() -> None:
    with pytest.raises(DataError, match="min_words 5 is above max_words 4"):
        Length(LengthSettings(min_words=5, max_words=4))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<think>a</think> b", None),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1 < 2 > 0\n</parameter>\n</function>\n</tool_call>", None),
        ('<think level="3">a</think ><think/>', None),
        ("<thinker> </thinking> < think> <b>", None),
        ("a\n<think>b", "line 2: <think> is not closed"),
        ("a</think>", "line 1: </think> closes nothing"),
        ("<think><tool_call></think></tool_call>", "line 1: <tool_call> is not closed before </think>; 2 in all"),
        ("<function=f><parameter=x></function>", "line 1: <parameter=x> is not closed before </function>"),
        ("```\n<think>\n```", None),
        ("<think>```\n```</think>", "line 2: the code fence '```</think>' is not closed"),
        ("```python\nx\n````\ny", None),
        ("````\n```\n````", None),
        ("~~~\n```\n~~~", None),
        ("text\n```sql\nselect", "line 2: the code fence '```sql' is not closed"),
        ("    ```\nindented code, no fence", None),
        ("```a`b``` in a line", None),
    ],
)
def test_tags_and_fences(text: str, problem: str | None) -> None:
    assert (Tags(TagsSettings()).judge(document(text)).detail or None) == problem


def test_tags_are_switched_and_configured() -> None:
    crossed = document("<a><b></a></b>")
    assert Tags(TagsSettings(names=["a", "b"])).judge(crossed).reason == "unbalanced_tags"
    assert Tags(TagsSettings(names=["a", "b"], nested=False)).judge(crossed).keeps
    assert Tags(TagsSettings(names=[])).judge(crossed).keeps
    assert not Tags(TagsSettings(skip_fenced=False)).judge(document("```\n<think>\n```")).keeps
    assert Tags(TagsSettings(code_fences=False)).judge(document("```\n")).keeps
    assert Tags(TagsSettings()).judge(document("<think>", "</think>")).detail.startswith("messages.0.content, line 1")
    with pytest.raises(DataError, match="'<a>' is no name of a tag"):
        Tags(TagsSettings(names=["<a>"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>"]), max_size=8))
def test_nesting_equals_repeated_cancelling(tags: list[str]) -> None:
    text = "".join(tags)
    while "<a></a>" in text or "<b></b>" in text:
        text = text.replace("<a></a>", "").replace("<b></b>", "")
    assert Tags(TagsSettings(names=["a", "b"])).judge(document("".join(tags))).keeps == (text == "")
