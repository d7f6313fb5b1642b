"""HTTP requests of the router itself and of its tools: to engines, render servers, sibling workers, routers.

A request is a context (``HttpClient.exchange``): its response is read within, and whatever way it ends, the
connection is reused only after a complete response. Invariants: every wait ends within the request's
time-out; a cancellation is never lost; redirects are not followed; no content coding is asked for.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import httptools

from kvatlas.router.http.error_texts import NotConnectedError, describe_error
from kvatlas.router.http.settings import ClientSettings, ClientStats
from kvatlas.router.http.upstream import UpstreamConnection, UpstreamError
from kvatlas.router.http.upstream_pool import Origin, UpstreamClient

# At one time, of one client; further ones wait. A fleet of a thousand engines is not asked all at once.
REQUESTS_MAX = 100
# Time limits are those of each request; the connection's own are only needed where a request has none.
_DAY_S = 86_400.0
# Addresses are kept at least so long as there are no more.
_ORIGINS_MIN = 64
# White space and control characters would end the request line or a field (RFC 9112, section 2.2).
_UNSAFE_TARGET = re.compile(r"[\x00-\x20\x7f]")
_UNSAFE_VALUE = re.compile(r"[\x00\r\n]")


class ResponseError(OSError):
    """There is no complete response of a server that was connected."""


class TooLongError(ResponseError):
    """A response's body is over the caller's limit."""


class HttpResponse:
    """The head of a response, and its body as it arrives. ``headers``: names in lower case."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> str:
        """Return the first field of this name; "" without one."""
        return next((value.decode("latin-1") for field, value in self.headers if field == name), "")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they arrive. Raises ``ResponseError`` if it breaks off."""
        while piece := await self._piece():
            yield piece

    async def body(self, bytes_max: int) -> bytes:
        """Return the whole body. Raises ``ResponseError`` if it breaks off or is longer."""
        pieces, size = [], 0
        while piece := await self._piece():
            pieces.append(piece)
            size += len(piece)
            if size > bytes_max:
                raise TooLongError(f"answer over {bytes_max} bytes")
        return b"".join(pieces)

    async def beginning(self, num_bytes: int) -> bytes:
        """Return this many bytes of the body, or all of it if it is shorter."""
        found = b""
        while len(found) < num_bytes and (piece := await self._piece()):
            found += piece
        return found[:num_bytes]

    async def _piece(self) -> bytes:
        try:
            return await self._connection.read()
        except UpstreamError as error:
            raise _as_os_error(error) from error


class HttpClient:
    """Connections to any number of servers; one per event loop, closed at the end of its context.

    ``headers`` are sent with every request. ``socket_path``: a Unix socket that all requests go to.
    ``pause_s_max``: longest wait for the next piece of a response. ``requests_max``: at one time.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        socket_path: str = "",
        pause_s_max: float = _DAY_S,
        requests_max: int = REQUESTS_MAX,
    ) -> None:
        self.headers = dict(headers or {})
        settings = ClientSettings(
            connect_timeout_s=pause_s_max,
            stream_head_timeout_s=pause_s_max,
            first_byte_timeout_s=pause_s_max,
            idle_timeout_s=pause_s_max,
        )
        self._pause_s_max = pause_s_max
        self._socket_path = socket_path
        self._origins: dict[str, Origin] = {}
        self._origins_max = _ORIGINS_MIN
        self._under_way = asyncio.Semaphore(requests_max)
        self._client = UpstreamClient(settings, ClientStats(), time.monotonic, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        url: str,
        timeout_s: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        once: bool = False,
    ) -> AsyncIterator[HttpResponse]:
        """Return the response to one request. ``timeout_s`` includes reading it; None: no limit but
        ``pause_s_max``. ``once``: it is not sent again if the server closes a reused connection.

        Raises ``TimeoutError``, ``NotConnectedError``, ``ResponseError``, and ``ValueError`` for an unusable
        URL or field.
        """
        parts = urlsplit(url)
        origin = self._origin(f"{parts.scheme}://{parts.netloc}")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = _head(method, target, origin.host_header, {**self.headers, **(headers or {})}, body)
        async with asyncio.timeout(timeout_s), self._under_way:
            try:
                connection = await self._client.request(
                    origin,
                    method,
                    head,
                    body or b"",
                    self._pause_s_max,
                    once=(lambda: None) if once else None,
                )
            except UpstreamError as error:
                raise _as_os_error(error) from error
            try:
                yield HttpResponse(connection)
            finally:
                self._client.release(connection)

    def _origin(self, base_url: str) -> Origin:
        """Return the address and its connections. Addresses of engines that have left are forgotten."""
        origin = self._origins.get(base_url)
        if origin is None:
            if len(self._origins) >= self._origins_max:
                self._origins = {url: one for url, one in self._origins.items() if one.open}
                self._origins_max = max(_ORIGINS_MIN, 2 * len(self._origins))
            origin = self._origins[base_url] = Origin.parse(base_url)
            origin.socket_path = self._socket_path
        return origin


def _head(method: str, target: str, host: bytes, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the head of a request. Raises ``ValueError`` if it would be read as more than one."""
    if _UNSAFE_TARGET.search(target):
        raise ValueError(f"a URL must not have white space or control characters: {target!r}")
    lines = [f"{method} {target} HTTP/1.1".encode(), b"host: " + host, b"user-agent: kvatlas"]
    for name, value in headers.items():
        if _UNSAFE_VALUE.search(value):
            raise ValueError(f"the header field {name} must not have line ends")
        lines.append(f"{name}: {value}".encode())
    if body is not None:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"\r\n"))


def _as_os_error(error: UpstreamError) -> OSError:
    """Return why there is no complete response, as an error that ``describe_error`` puts into words."""
    cause = error.__cause__
    if error.reason == "timeout":
        return TimeoutError()
    if isinstance(cause, OSError):
        return NotConnectedError(cause.errno, describe_error(cause))
    if isinstance(cause, httptools.HttpParserError):
        return ResponseError("not an HTTP answer")
    if error.reason == "broken_stream":
        return ResponseError("the answer ended early")
    return ResponseError("connection closed without an answer")
