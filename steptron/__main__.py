"""``python -m steptron`` is the `steptron` command."""

from __future__ import annotations

from steptron.cli.main import main

if __name__ == "__main__":
    main()
