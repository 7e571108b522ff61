"""What differs between the databases, as little as there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

Result = TypeVar("Result")


class Transaction(Protocol):
    """Statements that see one state of the database. Parameters are ``$1``, ``$2``, ..., never part of the text."""

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        """Runs a statement; its rows, if it has any."""

    def execute_many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Runs a statement once for each."""

    def table(self, sql: str, parameters: Sequence[object] = ()) -> pa.Table:
        """The rows of a query, lists and numbers without a Python object for each."""

    def append(self, table: str, rows: pa.Table) -> None:
        """Inserts many rows of numbers and lists of numbers."""

    def script(self, text: str) -> None:
        """Runs several statements."""


class Database(Protocol):
    """A database that the server keeps its tables in.

    Attributes:
        kind: of its migrations.
        name: for messages; without a password.
        refusals: errors of the driver that are about what was to be written.
    """

    kind: str
    name: str
    refusals: tuple[type[Exception], ...]

    def read(self) -> AbstractContextManager[Transaction]:
        """For reading only; from any thread."""

    def write(self, work: Callable[[Transaction], Result]) -> Result:
        """Does work in a transaction that is durable when this returns, and not done at all when it raises. Where the
        connection is lost it is done again from its start."""

    def parts(self, level: int) -> tuple[str, ...]:
        """The tables that a level consists of; new rows go to the first."""

    def tidy(self, thoroughly: bool) -> None:
        """What is to be done after writing, or thoroughly, after much has been deleted."""

    def size_bytes(self) -> int: ...

    def close(self) -> None: ...
