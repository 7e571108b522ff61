"""What datasets are called where there is no room for a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def short_names(paths: Sequence[Path]) -> list[str]:
    """For each path its last parts, as many as tell it from the others; one that is named twice gets a number."""
    known = {path: path.parts for path in paths}
    names = {}
    for path, parts in known.items():
        for length in range(1, len(parts) + 1):
            ending = parts[-length:]
            if sum(other[-length:] == ending for other in known.values()) == 1:
                break
        names[path] = "/".join(ending)
    seen: Counter[Path] = Counter()
    found = []
    for path in paths:
        seen[path] += 1
        found.append(names[path] if seen[path] == 1 else f"{names[path]} ({seen[path]})")
    return found
