"""The documents name only what is there: files, make targets and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steptron.cli.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def document(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_files_of_the_repository_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"(?<![\w/])((?:steptron|configs|tools|tests|docs|benchmarks)/[\w/-]*\.(?:py|yaml|sh|md))",
        document.read_text(encoding="utf-8"),
    )
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"`make ([a-z][\w-]*)|^make ([a-z][\w-]*)", document.read_text(encoding="utf-8"), re.M))
    named = {first or second for first, second in targets}
    assert named - set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.M)) == set()


def test_make_settings_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {name for line in re.findall(r"make [a-z].*", text) for name in re.findall(r"\b([A-Z][A-Z_0-9]+)=", line)}
    assert named - {"NAME"} - set(re.findall(r"^([A-Z_0-9]+) \?=", MAKEFILE, re.M)) == set()


def test_commands_exist(document: Path) -> None:
    named = re.findall(r"(?:`|^|/bin/)steptron ([a-z][\w-]*)", document.read_text(encoding="utf-8"), re.M)
    commands = app.info.cls.lazy_commands
    assert [name for name in named if name not in commands] == []
