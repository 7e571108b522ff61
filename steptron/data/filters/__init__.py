"""Filters of corpora: rules, decontamination, and the interface for others."""

from steptron.data.filters.interface import (
    KEEP,
    CorpusFilter,
    Document,
    Filter,
    FilterFactory,
    FilterSettings,
    Passage,
    Verdict,
)

__all__ = ["Document", "Passage", "Verdict", "KEEP", "Filter", "CorpusFilter", "FilterSettings", "FilterFactory"]
