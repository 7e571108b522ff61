"""Schema migrations: numbered scripts ``<kind of database>_<number>.sql``, each run once, in its own transaction."""

from __future__ import annotations

import re
import time
from pathlib import Path

from steptron_metrics.errors import MetricsError
from steptron_metrics.storage.database import Database, Transaction

FOLDER = Path(__file__).with_name("migrations")

_VERSIONS = "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL, applied_ns BIGINT NOT NULL)"


def scripts(kind: str, folder: Path = FOLDER) -> list[str]:
    """The migrations of a kind of database in order, from number 1 on without gaps."""
    numbered = {}
    for path in folder.glob(f"{kind}_*.sql"):
        if match := re.fullmatch(r"(\d{4})\.sql", path.name.removeprefix(f"{kind}_")):
            numbered[int(match[1])] = path
    if not numbered or sorted(numbered) != list(range(1, len(numbered) + 1)):
        raise MetricsError(
            f"{folder}: expected migrations {kind}_0001.sql and so on without gaps, got {sorted(numbered)}"
        )
    return [numbered[number].read_text(encoding="utf-8") for number in sorted(numbered)]


def version_of(database: Database) -> int:
    """Version of a database's schema; 0 where there is none."""
    with database.read() as transaction:
        try:
            found = transaction.execute(
                "SELECT count(*) FROM information_schema.tables WHERE table_name = 'schema_version' "
                "AND table_schema = current_schema()"
            )
        except Exception as error:
            raise MetricsError(f"{database.name} cannot be read: {error}") from error
        if not found[0][0]:
            return 0
        return int(transaction.execute("SELECT coalesce(max(version), 0) FROM schema_version")[0][0])


def check(database: Database, folder: Path = FOLDER) -> None:
    """For readers that must not change anything.

    Raises:
        MetricsError: the schema is not the one that this code works with.
    """
    known, version = len(scripts(database.kind, folder)), version_of(database)
    if version == 0:
        raise MetricsError(f"{database.name} holds no metrics: a metrics server has never written there")
    if version != known:
        older = (
            "start the metrics server once to bring it up to date" if version < known else "install a newer Steptron"
        )
        raise MetricsError(f"{database.name} has schema version {version}, and this is for version {known}: {older}")


def migrate(database: Database, folder: Path = FOLDER) -> int:
    """Brings a database to the newest schema.

    Returns:
        its version.

    Raises:
        MetricsError: the schema is newer than this code, or a migration failed; the database is as it was before it.
    """
    pending = scripts(database.kind, folder)
    version = version_of(database)
    if version > len(pending):
        raise MetricsError(
            f"{database.name} has schema version {version}, this Steptron knows versions up to {len(pending)}: "
            "install the newer Steptron that wrote it"
        )
    for number in range(version + 1, len(pending) + 1):
        text = pending[number - 1]

        def apply(transaction: Transaction, number: int = number, text: str = text) -> None:
            transaction.script(_VERSIONS)
            transaction.script(text)
            transaction.execute("INSERT INTO schema_version VALUES ($1, $2)", [number, time.time_ns()])

        try:
            database.write(apply)
        except MetricsError:
            raise
        except Exception as error:
            raise MetricsError(
                f"{database.name}: migration {number} failed and was undone, the schema stays at version {number - 1}: "
                f"{error}"
            ) from error
    return len(pending)
