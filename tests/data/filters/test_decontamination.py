"""Decontamination: planted items are found and named, near misses are not, and the index against a plain search."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.errors import DataError
from steptron.data.filters.benchmarks import BenchmarkSettings
from steptron.data.filters.decontamination import Decontamination, DecontaminationSettings
from steptron.data.filters.ngrams import ItemIndex
from steptron.data.filters.words import normalised_words, plain_words
from tests.data.corpora import write_jsonl
from tests.data.filters.documents import document
from tests.data.filters.questions import QUESTIONS, filler

_SAMPLE = range(0, len(QUESTIONS), 10)


@pytest.fixture(scope="module")
def decontamination(tmp_path_factory: pytest.TempPathFactory) -> Decontamination:
    path = write_jsonl(
        tmp_path_factory.mktemp("benchmark") / "planted.jsonl", [{"question": text} for text in QUESTIONS]
    )
    return Decontamination(DecontaminationSettings(benchmarks={"planted": BenchmarkSettings(files=[path])}))


def _with_other_digits(text: str) -> str:
    return "".join(str((int(c) * 7 + 3) % 10) * (1 + place % 2) if c.isdigit() else c for place, c in enumerate(text))


_DISGUISES = {
    "as it is": lambda text: text,
    "digits": _with_other_digits,
    "white space": lambda text: text.replace(" ", " \n\t "),
    "upper case": str.upper,
    "punctuation": lambda text: "“" + text.replace(",", " —").replace("?", " …") + "”",
    "LaTeX and Markdown": lambda text: "**" + text.replace(" 1", " $1$") + "**",
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "ligatures": lambda text: text.replace("fi", "ﬁ").replace("fl", "ﬂ"),
    "decomposed accents": lambda text: unicodedata.normalize("NFD", text),
    "invisible characters": lambda text: "\u200b".join(text).replace("e", "e\u00ad"),
}


@pytest.mark.parametrize("disguise", _DISGUISES)
def test_disguised_items_inside_long_documents_are_found_and_named(
    decontamination: Decontamination, disguise: str
) -> None:
    for number in _SAMPLE:
        text = f"{filler(number, 300)}\n{_DISGUISES[disguise](QUESTIONS[number])}\n{filler(number + 1, 300)}"
        verdict = decontamination.judge(document(text))
        assert verdict.reason == "planted exact", QUESTIONS[number]
        assert verdict.detail.split(" ")[0].endswith(f"planted.jsonl:{number + 1}")


def test_every_planted_item_is_found(decontamination: Decontamination) -> None:
    for number, question in enumerate(QUESTIONS):
        verdict = decontamination.judge(document(filler(number, 50), _with_other_digits(question).upper(), "yes"))
        assert verdict.detail.split(" ")[0].endswith(f"planted.jsonl:{number + 1}")


def test_an_item_split_over_messages_is_found(decontamination: Decontamination) -> None:
    words = QUESTIONS[0].split(" ")
    verdict = decontamination.judge(document(filler(0, 30), " ".join(words[:9]), " ".join(words[9:]), filler(1, 30)))
    assert verdict.reason == "planted exact"


def test_partial_overlap_is_found_from_the_threshold_on(tmp_path: Path) -> None:
    words = [f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(32)]  # 20 windows of 13
    path = tmp_path / "bench.txt"
    path.write_text(" ".join(words) + "\n")
    benchmarks = {"bench": BenchmarkSettings(files=[path])}
    decontamination = Decontamination(DecontaminationSettings(benchmarks=benchmarks, ngram_share=0.5))
    for length, found in ((22, 10), (21, 9), (31, 19)):
        text = f"{filler(1, 100)} {' '.join(words[:length])} {filler(2, 100)}"
        verdict = decontamination.judge(document(text))
        assert verdict.keeps == (found < 10), (length, verdict)
        if found == 10:
            assert verdict.reason == "bench ngram"
            assert verdict.value == 0.5
            assert verdict.detail == f"{path}:1 in 0.50 of its n-grams (10 of 20 13-grams, limit 0.5)"
    # Two pieces that are apart count together: 5 + 5 windows.
    pieces = f"{' '.join(words[:17])} {filler(1, 9)} {' '.join(words[15:])}"
    assert decontamination.judge(document(pieces)).value == 0.5
    only_exact = Decontamination(DecontaminationSettings(benchmarks=benchmarks, ngram_share=None))
    assert only_exact.judge(document(pieces)).keeps
    assert not only_exact.judge(document(f"a {' '.join(words)} b")).keeps
    only_ngrams = Decontamination(DecontaminationSettings(benchmarks=benchmarks, exact=False))
    assert only_ngrams.judge(document(f"a {' '.join(words)} b")).reason == "bench ngram"


def test_near_misses_are_kept(decontamination: Decontamination) -> None:
    for number in _SAMPLE:
        words = QUESTIONS[number].split(" ")
        shuffled = random.Random(number).sample(words, len(words))
        every_sixth_changed = [f"zz{word}" if place % 6 == 5 else word for place, word in enumerate(words)]
        for changed in (shuffled, every_sixth_changed):
            assert decontamination.judge(document(f"{filler(number, 50)} {' '.join(changed)}")).keeps


def test_short_items_are_matched_whole_and_very_short_ones_not(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "short.jsonl",
        [{"q": "Which of the planets has 2 moons named Phobos"}, {"q": "What is 2 plus 2 in total?"}],
    )
    benchmarks = {"short": BenchmarkSettings(files=[path], fields=["q"])}
    decontamination = Decontamination(DecontaminationSettings(benchmarks=benchmarks))
    found = decontamination.judge(document("so: which of the PLANETS has 12 moons, named “Phobos” (and Deimos)?"))
    assert found.reason == "short exact"
    assert decontamination.judge(document("which of the planets has 2 moons called Phobos")).keeps
    assert decontamination.judge(document("What is 2 plus 2 in total?")).keeps
    assert decontamination.summary == "1 items with 1 n-grams; 1 items with fewer than 8 words are not looked for"


def test_no_word_is_found_inside_another(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("he sat on a mat and saw me\n")
    decontamination = Decontamination(
        DecontaminationSettings(benchmarks={"b": BenchmarkSettings(files=[path])}, min_words=4)
    )
    assert decontamination.judge(document("she sat on a mat and saw me")).keeps
    assert decontamination.judge(document("he sat on a mat and saw men")).keeps
    assert not decontamination.judge(document("then he sat on a mat and saw me")).keeps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don’t PANIC, it's 1,234.5 km!", "don t panic it s 0 km"),
        ("x2 + 3y_4 = 5kg; [1, 2, 3]", "x 0 y 0 kg 0"),
        ("ﬁne Ｆｕｌｌ ½ ① Straße e\u0301", "fine full 0 strasse é"),
        ("soft\u00adhyphen zero\u200bwidth", "softhyphen zerowidth"),
        ("漢字 and かな٣", "漢 字 and か な 0"),
        ("「漢字」、コード・です。", "漢 字 コ ー ド で す"),
        ("", ""),
    ],
)
def test_normalised_words(text: str, words: str) -> None:
    assert normalised_words(text) == words.split()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=60))
def test_the_fast_way_for_ascii_follows_the_definition(text: str) -> None:
    assert normalised_words(text) == plain_words(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_normalising_again_changes_nothing(text: str) -> None:
    words = normalised_words(text)
    assert normalised_words(" ".join(words)) == words


_LETTERS = st.lists(st.sampled_from("abcde"), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(_LETTERS, min_size=1, max_size=4), st.sampled_from([0.3, 0.5, 1.0]))
def test_the_index_equals_a_plain_search(data: st.DataObject, items: list[list[str]], min_share: float) -> None:
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(items), _LETTERS, st.just(["z"])), max_size=5))
    words = [word for piece in pieces for word in piece]
    size, min_words = 3, 2

    def windows(sequence: list[str], length: int) -> list[tuple[str, ...]]:
        return [tuple(sequence[start : start + length]) for start in range(len(sequence) - length + 1)]

    expected = {}
    for number, item in enumerate(items):
        if len(item) < min_words:
            continue
        grams = set(windows(item, min(size, len(item))))
        found = grams & set(windows(words, min(size, len(item))))
        if tuple(item) in windows(words, len(item)):
            expected[number] = ("exact", len(found), len(grams))
        elif len(item) >= size and found and len(found) >= min_share * len(grams):
            expected[number] = ("ngram", len(found), len(grams))
    matches = ItemIndex(items, size, min_words).matches(words, min_share)
    assert {match.item: (match.kind, match.found, match.total) for match in matches} == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "b.jsonl:2: invalid JSON"),
        ("[1]", "b.jsonl:2: the line is a JSON array, not an object"),
        ({"prompt": "x"}, "b.jsonl:2: field 'question' is missing; there are: prompt. Name them in `fields`"),
        ({"question": 3}, "b.jsonl:2: field 'question' holds a JSON number, not a string or a list of strings"),
        (
            {"question": ["a", None]},
            "b.jsonl:2: field 'question' holds a list with a JSON null, not a string or a list of strings",
        ),
    ],
)
def test_a_benchmark_that_cannot_be_read_is_refused(
    tmp_path: Path, line: dict[str, object] | str, message: str
) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [{"question": "one two three four five six seven eight"}, line])
    with pytest.raises(DataError) as caught:
        Decontamination(DecontaminationSettings(benchmarks={"b": BenchmarkSettings(files=[path])}))
    assert message in str(caught.value)
    assert str(caught.value).startswith("benchmark b: ")


def test_a_benchmark_in_which_nothing_can_be_found_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [{"question": "too short"}])
    benchmarks = {"b": BenchmarkSettings(files=[path])}
    with pytest.raises(DataError, match="benchmarks b: no item has min_words 8 words"):
        Decontamination(DecontaminationSettings(benchmarks=benchmarks))
    with pytest.raises(DataError, match="nothing would be looked for"):
        Decontamination(DecontaminationSettings(benchmarks=benchmarks, exact=False, ngram_share=None))


def test_several_fields_are_one_item(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [{"q": "who of the four wrote it", "choices": ["Ada", "Bo"], "a": "Ada"}])
    settings = DecontaminationSettings(benchmarks={"b": BenchmarkSettings(files=[path], fields=["q", "choices", "a"])})
    decontamination = Decontamination(settings)
    assert decontamination.judge(document("Who of the four wrote it? (Ada, Bo)", "Ada.")).reason == "b exact"
    assert decontamination.judge(document("Who of the four wrote it? (Ada, Bo)", "Bo.")).keeps
