"""Counters of the admin API."""

from __future__ import annotations

import msgspec


class AdminStats(msgspec.Struct):
    """What became of requests to the admin API."""

    requests: int = 0
    """Authorized requests."""
    changes: dict[str, int] = {}
    """Changes carried out, by action."""
    refused: dict[str, int] = {}
    """Requests refused, by error code."""
