"""What people and other programs read: the HTTP API, Prometheus' endpoint and the page."""
