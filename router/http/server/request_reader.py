"""The requests that one client sends: HTTP/1.1 parsing (httptools), and the limits of heads and trailers.

Callbacks of the parser gather a head's fields and a body's bytes; what they make up is given to the
connection (``Receiver``) as it comes, a body's bytes once for each read. An offer to upgrade is declined.
What always holds: the work for one read is linear in its bytes, however they are cut into chunks; a head or
trailer beyond its limits is refused before it is whole; after ``stop`` no request begins any more.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools

from router.http.server.request_cycle import RequestCycle, head_problem, request_scope
from router.http.server.settings import ListenSettings, ListenStats
from router.http.sockets import NEVER
from router.openai.errors import ApiError, bad_request, head_too_large, no_tunnel

_FIELD_SIGNS = 4
"""Bytes of a field's line besides name and value."""
_UPGRADE_FIELDS = frozenset((b"upgrade", b"connection", b"http2-settings"))


class RefusedRequestError(Exception):
    """``error`` is the answer. Raised in a callback of the parser, which gives up, or after it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.code)
        self.error = error


class Receiver(Protocol):
    """Events that a reader reports to its connection."""

    def head_came(self, scope: dict[str, Any], *, keep_alive: bool, expects: bool) -> RequestCycle:
        """A request begins; what answers it. Raises ``RefusedRequestError``."""

    def body_came(self, exchange: RequestCycle, data: bytes, *, last: bool) -> None:
        """A piece of its body."""

    def trailer_began(self) -> None:
        """Fields come behind its body."""


class RequestReader:
    """See the module. ``connection`` is the part of the scopes that all requests share."""

    __slots__ = (
        *("_connection", "_fed_bytes", "_fields", "_given", "_head_bytes", "_in_trailer", "_parser"),
        *("_pieces", "_read_bytes", "_receiver", "_settings", "_stats", "_stopped", "_unfinished_bytes"),
        *("_url", "_weighed", "came", "exchange", "head_due", "in_head", "on_body", "read_s"),
    )

    def __init__(
        self, receiver: Receiver, connection: dict[str, Any], settings: ListenSettings, stats: ListenStats
    ) -> None:
        self._receiver = receiver
        self._connection = connection
        self._settings = settings
        self._stats = stats
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser without a Python frame in between
        self._parser = httptools.HttpRequestParser(self)
        self.exchange: RequestCycle | None = None
        """Whose body is being received."""
        self.in_head = False
        self._in_trailer = False
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []  # of the head, then of the trailer
        self._weighed = 0  # number of them that are in ``_head_bytes``
        self._head_bytes = 0  # of the head or trailer: what the parser has given
        self._unfinished_bytes = 0  # and what it was fed since without giving anything
        self._fed_bytes = 0  # since the read that the message began in, which is not less than its head
        self._read_bytes = 0  # of this read
        self.read_s = 0.0
        """When it came."""
        self._given = False
        self.came = False
        """It brought more than a part of a head's line."""
        self.head_due = NEVER
        self._stopped = False

    def stop(self) -> None:
        """Discard whatever arrives from here on."""
        self._stopped, self.in_head = True, False

    def read(self, data: bytes, now: float) -> None:
        """Parse what came. Raises ``RefusedRequestError``."""
        self.read_s, self.came = now, False
        rest: bytes | memoryview = data
        try:
            while rest and not self._stopped:
                try:
                    self._parse(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, RefusedRequestError):
                raise refused from None
            self._stats.bad_requests += 1
            raise RefusedRequestError(
                bad_request("invalid_http", "This is not a valid HTTP/1.1 request.")
            ) from error

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises what it raises."""
        self._given = False
        self._read_bytes = size = len(data)
        self._fed_bytes += size
        known = len(self._fields)
        try:
            self._parser.feed_data(data)
            if self.in_head or self.exchange is not None:
                self._check_unfinished(size, known)
        finally:
            if self._given:
                self.came = True
            if self._pieces:
                self._hand_over()
                self.came = True

    def _check_unfinished(self, size: int, known: int) -> None:
        """Count the bytes of an unfinished head, trailer or chunk frame after a read.

        ``known``: fields before the read. The parser keeps unfinished fields and frames without an event.
        """
        fields = len(self._fields)
        given = self._given or self._pieces or fields > known
        self._unfinished_bytes = 0 if given else self._unfinished_bytes + size
        if fields and not self.in_head and not self._in_trailer:
            self._in_trailer = self._given = True
            self._receiver.trailer_began()
        self._weigh_fields(self._unfinished_bytes)

    def _weigh_fields(self, more_bytes: int = 0) -> None:
        """Count the head's or trailer's fields that came, once each. Raises ``RefusedRequestError``
        where they are too many, together with ``more_bytes``."""
        new = self._fields[self._weighed :] if self._weighed else self._fields
        self._weighed += len(new)
        self._head_bytes += sum([len(name) + len(value) for name, value in new], _FIELD_SIGNS * len(new))
        line_bytes = len(self._url) if self.in_head else 0
        if line_bytes + self._head_bytes + more_bytes > self._settings.header_bytes_max:
            self._stats.header_overflows += 1
            raise RefusedRequestError(head_too_large(self._settings.header_bytes_max))

    def _hand_over(self, *, last: bool = False) -> None:
        """Give the request the body bytes that the parser found in this read, in one piece."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self.exchange is not None:
            self._receiver.body_came(self.exchange, data, last=last)

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._fields = []
        self.in_head, self._in_trailer = True, False
        self._weighed = self._head_bytes = 0
        self._fed_bytes = self._read_bytes
        self.head_due = self.read_s + self._settings.header_timeout_s
        self._given = True

    def on_url(self, url: bytes) -> None:
        self._given = True
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._stopped:
            return  # behind what was refused, in the same read
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RefusedRequestError(no_tunnel())
        if parser.should_upgrade():
            return
        if self._fed_bytes > self._settings.header_bytes_max:
            self._weigh_fields()
        fields = self._fields
        told = dict(fields)
        persists: bool = parser.should_keep_alive()
        # A connection that stays open without being asked to is of 1.1; the parser spells its version slowly.
        asked = b"connection" in told or b"proxy-connection" in told
        version = "1.1" if persists and not asked else parser.get_http_version()
        hosts: int = b"host" in told
        if len(told) < len(fields):  # something was said twice
            hosts = [name for name, _ in fields].count(b"host")
        if hosts != 1 or self._url.find(b"#") >= 0:
            self._look_for_problems(version, hosts)
        self.in_head = False
        self._fields = []
        self._weighed = self._head_bytes = 0
        self._given = True
        scope = request_scope(self._connection, version, method, self._url, fields, told)
        expects = b"expect" in told and _expects(fields)
        self.exchange = self._receiver.head_came(
            scope, keep_alive=persists and version == "1.1", expects=expects
        )

    def _look_for_problems(self, version: str, hosts: int) -> None:
        """Raises ``RefusedRequestError`` where the head has one."""
        if problem := head_problem(version, self._url, hosts):
            self._stats.bad_requests += 1
            raise RefusedRequestError(bad_request("invalid_http", problem))

    def on_message_complete(self) -> None:
        if self._pieces:
            self._hand_over(last=True)
        if self._fields and not self.in_head:
            self._weigh_fields()
        self._given = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.body_ended()

    def _decline_upgrade(self) -> None:
        """Parse the request again without its offer to upgrade, which a server may ignore.

        httptools takes everything after such a head for the other protocol and would lose the body.
        """
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value) for name, value in self._fields if name not in _UPGRADE_FIELDS
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"".join((*lines, b"\r\n")))


def _expects(fields: list[tuple[bytes, bytes]]) -> bool:
    """Whether the client waits to be told to send the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in fields)
