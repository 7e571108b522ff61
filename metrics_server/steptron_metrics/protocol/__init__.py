"""What goes over the wire; ``metrics.proto`` defines it, docs/metrics_protocol.md explains it."""

VERSION = 1
"""Of the protocol; the server refuses others."""
