"""Bounds of options, apart from the code that holds to them: the command line shows them without loading it."""

from __future__ import annotations

LARGEST_VOCABULARY = 1_000_000  # several times any in use; the tokenizers library aborts the process far above it
SMALLEST_TOKENIZER_SAMPLE = 10_000  # bytes; from less, a tokenizer learns next to nothing
