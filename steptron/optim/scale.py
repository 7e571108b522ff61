"""How large the orthogonal update of a matrix is made. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable

SCALES: dict[str, Callable[[int, int], float]] = {
    # Entries of about the size of AdamW's updates: 0.2 is its usual RMS (Moonlight, arXiv 2502.16982, section 2.2).
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # As Emerging-Optimizers names them.
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""By ``optimizer.muon.scale``: factor for a matrix of ``rows`` output and ``columns`` input features."""
