"""The head of a client's request: request line and fields (RFC 9112, section 3 and 5), gone through once."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httptools
import msgspec

Header = tuple[bytes, bytes]


class ClientHead(msgspec.Struct, eq=False, gc=False):
    """Nothing of it is changed: requests of equal heads may share one."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    raw_path: bytes
    query: bytes
    fields: list[Header]
    """Names in lower case."""
    by_name: dict[bytes, bytes]
    """The same fields, of a repeated one the last value."""
    version: str = "1.1"
    keep_alive: bool = True
    expects_continue: bool = False
    """The client waits for ``100 Continue`` (RFC 9110, section 10.1.1)."""
    sorted: Any = None
    """For an application to keep what it makes of the fields, the same for each request."""

    def with_fields(self, fields: list[Header]) -> ClientHead:
        """Return the same head with other fields."""
        return msgspec.structs.replace(self, fields=fields, by_name=dict(fields), sorted=None)


def head_error(version: str, url: bytes, hosts: int) -> str:
    """Return the error of a parsed head with this number of Host fields (RFC 9112, 3.2); empty: none."""
    if b"#" in url:
        # Engines cut the fragment off: the router would check another path than the engine answers.
        return "The request target contains '#', which is no part of it: leave it out, or write %23."
    if hosts != 1 and (hosts or version == "1.1"):
        return f"The request has {hosts or 'no'} Host fields; HTTP/1.1 asks for exactly one."
    return ""


def target_parts(url: bytes) -> tuple[str, bytes, bytes]:
    """Return path, path as sent, and query. Raises ``HttpParserInvalidURLError`` for an invalid absolute
    URL."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"?")
    elif url == b"*":
        raw_path, query = url, b""
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("latin-1")
    return unquote(path) if "%" in path else path, raw_path, query
