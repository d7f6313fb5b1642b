"""A client's request as it is handed on, read whole; its session; what an engine reports of its answer."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec


class Phases(Protocol):
    """Receives the phases of a request, one after the other."""

    def phase(self, name: str) -> None:
        """This begins, and what was before ends."""


class QueueTicketRequest(msgspec.Struct, frozen=True, gc=False):
    """Claims of a request where requests wait for each other."""

    tenant: str = ""
    """Tenant of its key; "" where keys are not used."""
    weight: float = 1.0
    """Share of its tenant beside others'."""
    priority: int = 1
    """Class: 0 is high, 1 normal, 2 low."""
    until_s: float | None = None
    """When its client gives up (monotonic seconds), if it said so."""
    wait_target_s: float | None = None
    """Longest predicted wait, where its tenant has a target of its own for the class."""
    level_s: float | None = None
    """Its target for the first token, from its arrival to ``due_s``."""
    due_s: float | None = None
    """When its first token is due (monotonic seconds), where it has a service level."""


NO_CLAIM = QueueTicketRequest()
Carried = Literal["", "gateway", "sidecar"]
"""Carrier of a request to its engines: the router; a gateway, to one; a gateway, to one whose sidecar asks
another one first."""


class Session(msgspec.Struct, frozen=True, gc=False):
    """The conversation or agent run that a request belongs to, as its client names it. Printable and bounded;
    clients choose it, so it allows nothing, and two tenants may use the same name for sessions of their own.
    """

    id: str
    agent: str = ""
    """The sub-agent within it; "" for the session's own requests."""


class InboundRequest(msgspec.Struct, gc=False):
    """One client request, read whole. ``model`` and ``stream`` are peeked from the body where it is JSON.

    ``headers`` are lower-case names; ``body`` is forwarded byte-identical.
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
    """Tenant of its key; "" where clients have none."""
    isolated: bool = False
    """Its ``cache_salt`` is of its tenant or group, set by the router."""
    cache_group: str = ""
    """The tenant or group that its salt is of; "" without one, or if its own salt is in it too."""
    session: Session | None = None
    earlier_response: str | None = None
    """Id of the response that it goes on from, asks for or cancels: one engine has it."""
    reads_response: bool = False
    """It asks for, deletes or cancels that response: its engine computes nothing, and may rest."""
    response_id: str = ""
    """Id that its own response gets, but for its engine (``response_ids``); "": of another API."""
    read_s: float | None = None
    """When its last byte was read (monotonic seconds); None where it did not come over HTTP."""
    priority: int = 0
    """Its place in an engine that schedules by priority, by its client or tenant; lower goes first."""
    claim: QueueTicketRequest = NO_CLAIM
    """Read only where requests may have to wait."""
    retention: tuple[str, bytes] | None = None
    """Its retention hint as JSON, behind what that rests on; set when it is placed."""
    prompt: Any = None
    """Parts of its prompt, decoded from this body; the reader takes them away."""
    context_tokens: float = 0.0
    """Longest context of the engines of its model, when it was placed."""
    longer_than: int = 0
    """An engine with a context of this many tokens has refused it as too long."""
    continues: bool = False
    """It goes on with a stream that broke: its turn in the queue is to come."""
    parses: bool = False
    """Its engine is to read reasoning and calls out of the ids of its answer."""
    at_once: bool = False
    """That has come: its engine has computed its prompt, and its client waits."""
    hides_usage: bool = False
    """The router asked for the usage of its stream, not its client."""


class Usage(msgspec.Struct, gc=False):
    """Usage as the engine reported it; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


# Reasons for a missing or incomplete answer of an engine.
FAILURES = ("refused", "reset", "timeout", "status", "broken_stream", "aborted")
