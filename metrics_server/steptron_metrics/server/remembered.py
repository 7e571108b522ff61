"""``database.json`` in a server's folder: where its results are when they are not in the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = "database.json"
_SECRET = ("password", "sslpassword", "passfile", "oauth_client_secret")


def write(folder: Path, database: str | None) -> None:
    """Remembers the PostgreSQL database of the server, without passwords; or that there is none.

    Args:
        database: its URL, or None.

    Raises:
        OSError: it cannot be written.
    """
    if database is None:
        (folder / FILE).unlink(missing_ok=True)
        return
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    parameters = {name: str(value) for name, value in conninfo_to_dict(database).items() if name not in _SECRET}
    draft = folder / f"{FILE}.new"
    draft.write_text(json.dumps({"postgresql": make_conninfo(**parameters)}) + "\n", encoding="utf-8")
    os.replace(draft, folder / FILE)


def read(folder: Path) -> str | None:
    """The connection string of the folder's server; None where its results are in the folder."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))["postgresql"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)
