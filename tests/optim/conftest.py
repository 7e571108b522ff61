"""What can be collected where."""

from __future__ import annotations

import sys

# emerging-optimizers needs Python 3.12, and is installed there (pyproject.toml).
collect_ignore = [] if sys.version_info >= (3, 12) else ["test_emerging_optimizers.py"]
