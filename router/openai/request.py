"""What the proxy needs from the rest of the router: a placement for one request, and where it reports back.

The proxy knows HTTP and bytes; who should answer is the planner's business. One request may be placed
several times (a retry before the first byte), never on an engine in ``exclude``.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class InboundRequest(msgspec.Struct, gc=False):
    """One client request, read whole. ``model`` and ``stream`` are peeked from the body where it is JSON.

    ``headers`` are lower-case names as ASGI gives them; ``body`` is forwarded byte-identical.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str | None = None
    stream: bool = False
    request_id: bytes = b""
    """The client's ``x-request-id``, or the one made for it."""


class Usage(msgspec.Struct, gc=False):
    """What the engine reported; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


class Placement(Protocol):
    """One request on one engine. Exactly one of ``finished`` and ``failed`` is called, once, at the end."""

    engine_id: str
    base_url: str
    """``http://host:port`` without a trailing slash."""
    engine_headers: tuple[tuple[bytes, bytes], ...]
    """Added to the forwarded request, e.g. ``x-data-parallel-rank``."""
    expected_s: float
    """Seconds that the engine should need until its first token."""
    client_headers: tuple[tuple[bytes, bytes], ...]
    """Added to the answer, e.g. ``x-kvatlas-engine``; empty unless ``expose_decision`` is on."""

    def first_byte(self) -> None:
        """The engine's first body byte of a successful (2xx) answer arrived: its prefill is over."""

    def finished(self, usage: Usage | None) -> None:
        """The answer ended (also when the client went away: ``usage`` is None then)."""

    def failed(self, reason: str) -> None:
        """The engine did not answer, or broke off; ``reason`` is one of ``FAILURES``."""


FAILURES = ("refused", "reset", "timeout", "status", "broken_stream")


class Planner(Protocol):
    """Chooses the engine for a request."""

    async def place(self, request: InboundRequest, *, exclude: frozenset[str]) -> Placement:
        """Raises ``ApiError`` (model_not_found, no_ready_engine) when there is nobody to ask."""
