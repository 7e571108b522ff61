"""Reading what each pipeline stage holds."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptron.config.pipeline_layout import StageContents, parse_pipeline_layout

FIELD = "parallel.pipeline_layout"


def sizes(text: str, num_stages: int, num_layers: int, mtp_depths: int | None = None) -> list[int]:
    return [stage.layers for stage in parse_pipeline_layout(text, num_stages, num_layers, mtp_depths)]


def test_what_the_stages_hold() -> None:
    assert parse_pipeline_layout("Et|tt||mmL", 4, 3, 2) == (
        StageContents(embedding=True, layers=1, mtp_depths=0, loss=False),
        StageContents(embedding=False, layers=2, mtp_depths=0, loss=False),
        StageContents(embedding=False, layers=0, mtp_depths=0, loss=False),
        StageContents(embedding=False, layers=0, mtp_depths=2, loss=True),
    )


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Ett|tt|ttL", [2, 2, 2]),
        ("E|t*5|L", [0, 5, 0]),
        ("Et*2|(t|)*2tL", [2, 1, 1, 1]),
        ("E(t|)*3,L", [1, 1, 1, 0]),
        ("E,t,|,t*2,,|(t,t|)*1,L", [1, 2, 2, 0]),
        ("E(t*2|)*2L", [2, 2, 0]),
        ("Et|*3tL", [1, 0, 0, 1]),
        ("E(t|t)*2|L", [1, 2, 1, 0]),
        ("Et,*2|(t),*2L", [2, 2]),
    ],
)
def test_notation(text: str, layers: list[int]) -> None:
    assert sizes(text, len(layers), sum(layers), 0) == layers


# Layout, stages, layers, MTP depths, message after the field.
REFUSED = [
    ("", 2, 4, 0, " () has 1 stage, but parallel.pipeline x virtual_pipeline is 2: write 1 of | between stages"),
    (
        "Ett|tt|L",
        2,
        4,
        0,
        " (Ett|tt|L) has 3 stages, but parallel.pipeline x virtual_pipeline is 2: write 1 of | between stages",
    ),
    ("Ett|tL", 2, 4, 0, " (Ett|tL) has 3 of t, but model.num_layers is 4: write exactly 4 of t"),
    ("Ett|ttmL", 2, 4, 3, " (Ett|ttmL) has 1 of m, but model.mtp.depths is 3: write exactly 3 of m"),
    ("Ett|ttmL", 2, 4, 0, " (Ett|ttmL) has 1 of m, but model.mtp.depths is 0: write exactly 0 of m"),
    (
        "tt|ttL",
        2,
        4,
        0,
        " (tt|ttL): stage 0 of 0 to 1 has no embedding (E): the first stage must be of the form E t*",
    ),
    ("Ett|tt", 2, 4, 0, " (Ett|tt): stage 1 of 0 to 1 has no loss (L): the last stage must be of the form t* m* L"),
    (
        "Ett|ttL|",
        3,
        4,
        0,
        " (Ett|ttL|), character 7: the loss (L) in stage 1 of 0 to 2 belongs to the last stage: "
        "this stage must be of the form t*",
    ),
    (
        "|Ett|ttL",
        3,
        4,
        0,
        " (|Ett|ttL): stage 0 of 0 to 2 has no embedding (E): the first stage must be of the form E t*",
    ),
    (
        "tEt|ttL",
        2,
        4,
        0,
        " (tEt|ttL), character 2: the embedding (E) in stage 0 of 0 to 1 cannot follow a decoder layer (t): "
        "the first stage must be of the form E t*",
    ),
    (
        "EEtt|ttL",
        2,
        4,
        0,
        " (EEtt|ttL), character 2: the embedding (E) in stage 0 of 0 to 1 is there twice: "
        "the first stage must be of the form E t*",
    ),
    (
        "Ett|EttL",
        2,
        4,
        0,
        " (Ett|EttL), character 5: the embedding (E) in stage 1 of 0 to 1 belongs to the first stage: "
        "the last stage must be of the form t* m* L",
    ),
    (
        "Ett|ttm|L",
        3,
        4,
        1,
        " (Ett|ttm|L), character 7: the MTP depth (m) in stage 1 of 0 to 2 belongs to the last stage: "
        "this stage must be of the form t*",
    ),
    (
        "Ettm|ttL",
        2,
        4,
        1,
        " (Ettm|ttL), character 4: the MTP depth (m) in stage 0 of 0 to 1 belongs to the last stage: "
        "the first stage must be of the form E t*",
    ),
    (
        "Ett|mttL",
        2,
        4,
        1,
        " (Ett|mttL), character 6: the decoder layer (t) in stage 1 of 0 to 1 cannot follow a MTP depth (m): "
        "the last stage must be of the form t* m* L",
    ),
    (
        "Ett|ttLm",
        2,
        4,
        1,
        " (Ett|ttLm), character 8: the MTP depth (m) in stage 1 of 0 to 1 cannot follow the loss (L): "
        "the last stage must be of the form t* m* L",
    ),
    (
        "Ett|ttL*2",
        2,
        4,
        0,
        " (Ett|ttL*2), character 7: the loss (L) in stage 1 of 0 to 1 is there twice: "
        "the last stage must be of the form t* m* L",
    ),
    # -------------------------------------------------------------------------------- notation
    *(
        (
            text,
            2,
            4,
            0,
            f" ({text}), character {place}: {what} is not understood here: expected E, t, m, L or |, "
            "x*N for N of x, or (…)*N for a part",
        )
        for text, place, what in [
            ("Ett|txL", 6, "x"),
            ("Ett|tTL", 6, "T"),
            ("Ett |ttL", 4, " "),
            ("Et2|ttL", 3, "2"),
            ("Et*1,2|ttL", 6, "2"),
            ("Et*2*2|L", 5, "*"),
            ("*2Ett|L", 1, "*"),
            ("Ett)*2|L", 4, ")"),
            ("E(t)*2*2|L", 7, "*"),
        ]
    ),
    ("E*|ttL", 2, 4, 0, " (E*|ttL), character 2: * must be followed by a number"),
    ("Et|tttL*", 2, 4, 0, " (Et|tttL*), character 8: * must be followed by a number"),
    ("Et*0|L", 2, 4, 0, " (Et*0|L), character 4: 0 is not a possible number of repeats: write 1 to 100000"),
    (
        "Et*99999999999|L",
        2,
        4,
        0,
        " (Et*99999999999|L), character 4: 99999999999 is not a possible number of repeats: write 1 to 100000",
    ),
    ("E(tt|ttL", 2, 4, 0, " (E(tt|ttL), character 2: ( is never closed: write (…)*N"),
    (
        "E(tt)|ttL",
        2,
        4,
        0,
        " (E(tt)|ttL), character 5: ) must be followed by *N, how often the part is repeated",
    ),
    (
        "E((t)*2|)*2L",
        3,
        4,
        0,
        " (E((t)*2|)*2L), character 3: ( stands inside parentheses, which cannot be nested: write it out",
    ),
    (
        "E()*2tt|ttL",
        2,
        4,
        0,
        " (E()*2tt|ttL), character 2: ( opens an empty pair: leave it out, or write what is repeated",
    ),
    (
        "E(t*50000)*100000|L",
        2,
        4,
        0,
        ", character 2: more than 100000 layers and stages, written out",
    ),
]


@pytest.mark.parametrize(("text", "num_stages", "num_layers", "mtp_depths", "message"), REFUSED)
def test_refused(text: str, num_stages: int, num_layers: int, mtp_depths: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_pipeline_layout(text, num_stages, num_layers, mtp_depths)
    assert str(caught.value) == FIELD + message


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet="EtmL|,()*0123 ", max_size=12))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        stages = parse_pipeline_layout(text, 2, 3, 1)
    except ValueError as error:
        assert str(error).startswith(FIELD)
    else:
        assert sum(stage.layers for stage in stages) == 3 and stages[-1] == StageContents(
            False, stages[-1].layers, 1, True
        )


def test_torch_is_not_loaded() -> None:
    code = "import steptron.config.pipeline_layout, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
