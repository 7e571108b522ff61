"""Files of tokens, and what they allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron_metrics.access import load_tokens
from steptron_metrics.errors import MetricsError

WRITER, READER, BOTH = "writer-0123456789", "reader-0123456789", "both-0123456789abc"
GOOD = f"""
- token: {WRITER}
  may: [write]
  runs: ["flash-*", exact]
- token: {READER}
  may: [read]
- token: {BOTH}
  may: [read, write, delete]
  runs: ["small?"]
"""


def file(tmp_path: Path, content: str, mode: int = 0o600) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_each_token_allows_what_its_entry_says(tmp_path: Path) -> None:
    access = load_tokens(file(tmp_path, GOOD))
    assert access.asks
    assert access.check(WRITER, "write", "flash-1") is None
    assert access.check(WRITER, "write", "exact") is None
    assert access.check(WRITER, "write", None) is None
    assert access.check(WRITER, "write", "exact2") == "this token does not allow to write run 'exact2'"
    assert access.check(WRITER, "write", "Flash-1") is not None
    assert access.check(WRITER, "read", "flash-1") == "this token does not allow to read"
    assert access.check(READER, "read", "anything") is None
    assert access.check(READER, "delete", "anything") is not None
    assert access.check(BOTH, "delete", "small1") is None and access.check(BOTH, "delete", "small12") is not None
    assert "a token is needed" in str(access.check(None, "read", None))
    for unknown in ("", WRITER[:-1], WRITER + "x", "x" * 100_000, "ключ-ключ-ключ-ключ", "\udcff" * 20):
        assert access.check(unknown, "write", None) == "this token is not one of the server's"
        assert not access.knows(unknown)
    assert access.knows(READER) and not access.knows(None)


def test_without_a_file_nothing_is_asked_for() -> None:
    access = load_tokens(None)
    assert not access.asks and access.knows(None) and access.check(None, "delete", "run") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a list"),
        ("token: x", "expected a list"),
        ("[]", "expected a list"),
        ("- token: [", "line 1: no YAML"),
        ("- just text", "entry 1: expected a mapping"),
        (GOOD + "- token: short\n  may: [read]", "entry 4: token: 5 characters, expected 16 to 4096"),
        (GOOD + "- token: 12345678901234567890\n  may: [read]", "entry 4: token: expected printable ASCII"),
        (GOOD + "- token: has blanks in its middle\n  may: [read]", "entry 4: token: expected printable ASCII"),
        (GOOD + f"- token: {READER}\n  may: [write]", "entry 4: the token of an entry before"),
        ("- may: [read]", "entry 1: token: expected"),
        (f"- token: {READER}", "entry 1: may: None, expected a list of write, read, delete"),
        (f"- token: {READER}\n  may: read", "entry 1: may: 'read'"),
        (f"- token: {READER}\n  may: [admin]", r"entry 1: may: \['admin'\]"),
        (f"- token: {READER}\n  may: [[read]]", "entry 1: may:"),
        (f"- token: {READER}\n  may: [read]\n  runs: a", "entry 1: runs: 'a'"),
        (f"- token: {READER}\n  may: [read]\n  runs: [1]", r"entry 1: runs: \[1\]"),
        (f"- token: {READER}\n  may: [read]\n  run: [a]", "entry 1: unknown run; expected token, may and runs"),
    ],
)
def test_a_wrong_entry_is_named_and_no_token_is(tmp_path: Path, content: str, message: str) -> None:
    path = file(tmp_path, content)
    with pytest.raises(MetricsError, match=message) as raised:
        load_tokens(path)
    assert str(path) in str(raised.value)
    assert READER not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="No such file"):
        load_tokens(tmp_path / "none.yaml")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MetricsError, match="no UTF-8 text"):
        load_tokens(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_only_its_owner_can_read(tmp_path: Path, mode: int) -> None:
    assert load_tokens(file(tmp_path, GOOD, mode)).asks


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = file(tmp_path, GOOD, mode)
    with pytest.raises(MetricsError, match=rf"others than its owner .*\(mode {mode:04o}\): chmod 600 {path}"):
        load_tokens(path)
