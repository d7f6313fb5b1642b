"""Who takes a request to its engine and brings the answer: our own connections, or a gateway that has the
client already and is told where to send it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from router.admission.tenants import TenantRequest
from router.http.client.pool import UpstreamClient
from router.http.server.connection.exchange import Exchange
from router.observe.requests import RequestRecord
from router.openai.request import InboundRequest
from router.proxy.attempt import Attempt
from router.proxy.headers import RequestHead, request_head


class Outbound(msgspec.Struct, gc=False):
    """A client's request as it goes out: the same for every engine but for host and placement headers."""

    request: InboundRequest
    head: RequestHead
    target: bytes
    """Path and query exactly as the client spelled them."""
    record: RequestRecord
    entry: TenantRequest | None = None
    """Of the tenant it came from, where clients have keys."""
    carrier: Carrier | None = None
    """None: our own connections."""
    own: Exchange | None = None
    """Where it came from, if that is our own listener."""


class Answer(Protocol):
    """An engine's answer while it comes: status and header fields first, then ``read`` until ``finished``."""

    status: int
    headers: list[tuple[bytes, bytes]]
    complete: bool
    """All of it has come."""

    @property
    def finished(self) -> bool:
        """Everything has been read."""

    def take(self) -> bytes | None:
        """All that has come; None: nothing yet."""

    def changed(self, step: Callable[[], bool] | None = None) -> Awaitable[None]:
        """To be awaited where ``take`` gave None; then there may be something. ``step`` may be called instead
        for each thing that comes, as long as it says True; what it raises, this raises."""

    async def read(self) -> bytes:
        """At least one byte of the body; ``b""`` at its end. Raises ``UpstreamError``."""


class Carrier(Protocol):
    """Takes a request to the engine of an attempt, and brings the answer."""

    def ask(self, attempt: Attempt, out: Outbound, timeout_s: float) -> Awaitable[Answer | None]:
        """Send it, and wait for the answer's head; None: it went to the client unseen, and should be over.
        Raises ``UpstreamError``."""

    def done(self, answer: Answer) -> None:
        """The answer is not needed any more."""

    def may_retry(self) -> bool:
        """Whether another engine may be asked after a failure."""


class OwnConnections:
    """The carrier of one attempt after another over our own connections to engines."""

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    def ask(
        self,
        attempt: Attempt,
        out: Outbound,
        timeout_s: float,
        once: Callable[[], None] | None = None,
        body: bytes | None = None,
    ) -> Awaitable[Any]:
        """See ``Carrier``; ``once`` as for ``UpstreamClient.exchange``; ``body``: instead of the client's."""
        request = out.request
        if body is None:
            body = request.body
        origin = self._client.origin(attempt.base_url)
        has_body = body or out.head.content_length is not None or request.method == "POST"
        head = request_head(
            request.method,
            origin.path_prefix + out.target,
            origin.host_header,
            out.head.fields,
            own=attempt.engine_headers,
            length=len(body) if has_body else None,
        )
        return self._client.exchange(origin, request.method, head, body, timeout_s, once=once)

    def done(self, answer: Any) -> None:
        """See ``Carrier``."""
        self._client.done(answer)

    def may_retry(self) -> bool:
        """See ``Carrier``."""
        return True
