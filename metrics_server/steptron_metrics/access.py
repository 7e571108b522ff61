"""Who may do what: bearer tokens, for gRPC and HTTP alike.

A file of tokens is a YAML list::

    - token: 3f9c...            # at least 16 characters; `openssl rand -hex 32` makes one
      may: [write]              # write: send frames; read: the API and the page; delete: runs
      runs: ["flash-*"]         # patterns of run names; all runs where it is left out
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

import yaml

from steptron_metrics.errors import MetricsError

Right = Literal["write", "read", "delete"]
RIGHTS: tuple[str, ...] = get_args(Right)
MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 4096


@dataclass(frozen=True)
class Token:
    """A token: ``digest`` is the SHA-256 of its characters, ``may`` its rights, ``runs`` patterns of run names."""

    digest: bytes
    may: frozenset[str]
    runs: tuple[str, ...]


class Access:
    """Answers whether a token allows something.

    Args:
        tokens: those that there are; None: none are asked for, and everything is allowed.
    """

    def __init__(self, tokens: Sequence[Token] | None) -> None:
        self._tokens = None if tokens is None else tuple(tokens)

    @property
    def asks(self) -> bool:
        """Whether tokens are asked for at all."""
        return self._tokens is not None

    def knows(self, token: str | None) -> bool:
        """Whether a token is one of the server's, whatever it allows; also where none are asked for."""
        return self._tokens is None or self._find(token) is not None

    def check(self, token: str | None, may: Right, run: str | None) -> str | None:
        """Why a token does not allow something; None when it does.

        Args:
            token: what came after ``Bearer``; None without one.
            may: the right that is needed.
            run: on which run; None: on any at all.
        """
        if self._tokens is None:
            return None
        if token is None:
            return "a token is needed: send 'authorization: Bearer <token>'"
        found = self._find(token)
        if found is None:
            return "this token is not one of the server's"
        if may not in found.may:
            return f"this token does not allow to {may}"
        if run is not None and not any(fnmatchcase(run, pattern) for pattern in found.runs):
            return f"this token does not allow to {may} run {run!r}"
        return None

    def patterns(self, token: str | None) -> tuple[str, ...] | None:
        """Patterns of run names that a token is limited to; None where it is not."""
        found = self._find(token)
        return None if found is None or "*" in found.runs else found.runs

    def _find(self, token: str | None) -> Token | None:
        if token is None or len(token) > MAX_TOKEN_LENGTH:
            return None
        # Digests of one length, all of them compared in constant time: the answer's time tells nothing of a token.
        digest = _digest(token)
        found = None
        for one in self._tokens or ():
            if hmac.compare_digest(one.digest, digest):
                found = one
        return found


def load_tokens(path: Path | None) -> Access:
    """Reads a file of tokens.

    Args:
        path: of it; None: no tokens are asked for.

    Raises:
        MetricsError: it cannot be read, others than its owner can read or change it, or an entry is wrong; the message
            names file and entry, never a token.
    """
    if path is None:
        return Access(None)
    try:
        mode = path.stat().st_mode
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError(f"tokens {path}: {getattr(error, 'strerror', None) or 'no UTF-8 text'}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise MetricsError(
            f"tokens {path}: others than its owner can read or change it (mode {stat.S_IMODE(mode):04o}): "
            f"chmod 600 {path}"
        )
    try:
        entries = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise MetricsError(f"tokens {path}: {where}no YAML ({getattr(error, 'problem', None)})") from None
    if not isinstance(entries, list) or not entries:
        raise MetricsError(f"tokens {path}: expected a list of entries with token, may and runs")
    tokens: list[Token] = []
    for number, entry in enumerate(entries, 1):
        try:
            token = _parse(entry)
        except ValueError as error:
            raise MetricsError(f"tokens {path}, entry {number}: {error}") from None
        if any(token.digest == other.digest for other in tokens):
            raise MetricsError(f"tokens {path}, entry {number}: the token of an entry before")
        tokens.append(token)
    return Access(tokens)


def _parse(entry: object) -> Token:
    if not isinstance(entry, dict):
        raise ValueError("expected a mapping with token, may and runs")
    unknown = sorted(str(key) for key in entry.keys() - {"token", "may", "runs"})
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; expected token, may and runs")
    token = entry.get("token")
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("token: expected printable ASCII characters without blanks, in quotes if they are digits")
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        raise ValueError(f"token: {len(token)} characters, expected {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH}")
    may = entry.get("may")
    if not isinstance(may, list) or not may or any(right not in RIGHTS for right in may):
        raise ValueError(f"may: {may!r}, expected a list of {', '.join(RIGHTS)}")
    runs = entry.get("runs", ["*"])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, str) and run for run in runs):
        raise ValueError(f"runs: {runs!r}, expected a list of patterns such as 'flash-*'")
    return Token(_digest(token), frozenset(may), tuple(runs))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
