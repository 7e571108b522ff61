"""Refusals of requests."""

from __future__ import annotations


class ApiError(Exception):
    """A request that is not answered, and why.

    Attributes:
        status: of HTTP.
        reason: for people; goes to the client.
        headers: of the answer.
    """

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = headers or {}
