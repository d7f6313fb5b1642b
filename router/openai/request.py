"""A client's request as it is handed on, read whole, and what an engine reports of its answer."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec


class Phases(Protocol):
    """Is told what the router does with a request, one thing after the other."""

    def phase(self, name: str) -> None:
        """This begins, and what was before ends."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a request may claim where requests wait for each other."""

    tenant: str = ""
    """Whose key it came with; "" where nobody has one."""
    weight: float = 1.0
    """Share of its tenant beside others'."""
    priority: int = 1
    """Class: 0 is high, 1 normal, 2 low."""
    until_s: float | None = None
    """When its client gives up (monotonic seconds), if it said so."""
    wait_target_s: float | None = None
    """Longest predicted wait, where its tenant has a target of its own for the class."""
    due_s: float | None = None
    """When its first token is due (monotonic seconds), where it has a service level."""


NO_CLAIM = Claim()
Carried = Literal["", "gateway", "sidecar"]
"""Who takes a request to its engines: we; a gateway, to one; a gateway, to one whose sidecar asks another one
first."""


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
    client: int = 0
    """Tells clients apart: by tenant where they have keys, else by address; only in this process."""
    trace: Phases | None = None
    """Of a request that is traced."""
    pinned: str | None = None
    """The engine that the client has chosen, where it may."""
    among: frozenset[str] | None = None
    """``host:port`` of the engines that may take it, where a gateway says so."""
    carried: Carried = ""
    tenant: str = ""
    """Whose key it came with; "" where clients have none."""
    earlier_response: str | None = None
    """Id of the response that it goes on from, asks for or cancels: one engine has it."""
    read_s: float | None = None
    """When its last byte was read (monotonic seconds); None where it did not come over HTTP."""
    claim: Claim = NO_CLAIM
    """Read only where requests may have to wait."""
    prompt: Any = None
    """What its prompt is made of, decoded from this body; whoever reads it takes it away."""


class Usage(msgspec.Struct, gc=False):
    """What the engine reported; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


FAILURES = ("refused", "reset", "timeout", "status", "broken_stream", "aborted")
"""Why an engine did not answer whole."""
