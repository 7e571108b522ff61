"""The sending side: :class:`MetricsClient`, without torch, for any trainer."""

from steptron_metrics.client.client import ClientStatus, MetricsClient, Request
from steptron_metrics.client.frame import Layout
from steptron_metrics.client.settings import Tuning
from steptron_metrics.protocol.description import Combination, Folding, Series
from steptron_metrics.results import Event

__all__ = [
    "ClientStatus",
    "Combination",
    "Event",
    "Folding",
    "Layout",
    "MetricsClient",
    "Request",
    "Series",
    "Tuning",
]
