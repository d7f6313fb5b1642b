"""Carriers take a request to its engine and bring the answer: our own connections, or a gateway that has the
client already and learns where to send it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from kvatlas.router.admission.tenants import TenantRequest
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.http.upstream_pool import UpstreamClient
from kvatlas.router.observe.requests import RequestRecord
from kvatlas.router.openai.members import before_others
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import of_engine, with_id
from kvatlas.router.proxy.attempt import Answer, Attempt, Had
from kvatlas.router.proxy.continuation import ContinuedStream
from kvatlas.router.proxy.continuation_plan import ContinuationPlan
from kvatlas.router.proxy.deaths import digest_of
from kvatlas.router.proxy.headers import RequestHead, request_head
from kvatlas.router.proxy.kept_stream import KeptStream

# The ids of an answer, and of its prompt, as JSON.
_WHOLE_BYTES_MAX: Final = 32 << 20


class Outbound(msgspec.Struct, gc=False):
    """A client's request as it goes out: the same for every engine but for host and placement headers."""

    client: ClientRequest
    """The request as it came, and where its answer goes."""
    request: InboundRequest
    head: RequestHead
    target: bytes
    """Path and query exactly as the client spelled them."""
    record: RequestRecord
    entry: TenantRequest | None = None
    """Of the tenant it came from, where clients have keys."""
    carrier: Carrier | None = None
    """None: our own connections."""
    client_body: bytes = b""
    """As the client sent it."""
    had: Had = Had.NOTHING
    plan: ContinuationPlan | str = ""
    """How its stream may go on from another engine, or why not (a label); "": it is not asked for that."""
    broke: KeptStream | None = None
    """The state of its stream, which broke and may go on."""
    goes_on: ContinuedStream | None = None
    """The stream that it goes on with."""
    tells: bool = False
    """Its client sees decisions."""
    lost: str = ""
    """The engine whose answer broke off, if it may have died."""
    asked_s: float = 0.0
    """When an engine was last asked."""
    _digest: bytes = b""

    def digest(self) -> bytes:
        """The name of what the client asks, alike for each attempt of it; made once."""
        if not self._digest:
            body = self.client_body or self.request.body
            self._digest = digest_of(self.request.tenant, self.request.path, body)
        return self._digest


class Carrier(Protocol):
    """Takes a request to the engine of an attempt, and brings the answer."""

    def ask(self, attempt: Attempt, out: Outbound, timeout_s: float) -> Awaitable[Answer | None]:
        """Send it, and wait for the answer's head; None: it went to the client unseen, and should be over.
        Raises ``UpstreamError``."""

    def done(self, answer: Answer) -> None:
        """The answer is not needed any more."""

    @property
    def may_retry(self) -> bool:
        """Whether another engine may be asked after a failure."""


class OwnConnections:
    """The carrier of one attempt after another over our own connections to engines."""

    may_retry = True

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self.done: Callable[[Any], None] = client.release
        """Implement ``Carrier``."""

    def ask(
        self,
        attempt: Attempt,
        out: Outbound,
        timeout_s: float,
        once: Callable[[], None] | None = None,
    ) -> Awaitable[Any]:
        """Implement ``Carrier``; ``once`` as for ``UpstreamClient.request``."""
        request = out.request
        body = request.body if attempt.sent_body is None else attempt.sent_body
        origin = self._client.origins.get(attempt.base_url) or self._client.origin(attempt.base_url)
        named: bytes | memoryview = body
        begin = b""
        if request.response_id:
            begin, named = with_id(body, of_engine(request.response_id, attempt.engine_id))
        elif isinstance(out.plan, ContinuationPlan) and attempt.says_ids:
            begin, named = before_others(body, b"return_token_ids", b"true")
        has_body = body or out.head.content_length is not None or request.method == "POST"
        head = request_head(
            request.method,
            origin.path_prefix + out.target,
            origin.host_header,
            out.head.fields,
            own=attempt.engine_headers,
            length=len(begin) + len(named) if has_body else None,
        )
        # The body's beginning goes out with the head: nothing of it is copied.
        return self._client.request(
            origin, request.method, head + begin, named, timeout_s, once=once, ready=attempt.check_eligible
        )

    async def whole(
        self, attempt: Attempt, out: Outbound, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Ask the engine of an attempt something beside its request, with the client's headers. Returns its
        status and the whole body. Raises ``UpstreamError``."""
        origin = self._client.origins.get(attempt.base_url) or self._client.origin(attempt.base_url)
        head = request_head(
            "POST",
            origin.path_prefix + path.encode(),
            origin.host_header,
            out.head.fields,
            own=attempt.engine_headers,
            length=len(body),
        )
        answer = await self._client.request(origin, "POST", head, body, timeout_s)
        data = bytearray()
        try:
            while piece := await answer.read():
                data += piece
                if len(data) > _WHOLE_BYTES_MAX:
                    raise UpstreamError("reset")
        finally:
            self._client.release(answer)
        return answer.status, bytes(data)
