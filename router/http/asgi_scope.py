"""The ASGI scope of a request: the part of its connection, and the part of its head."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools

from kvatlas.router.http.request_cycle import HEADERS_BY_NAME

ASGI = {"version": "3.0", "spec_version": "2.4"}


def connection_scope(transport: asyncio.BaseTransport, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part that all requests of a connection share. ``state`` is the lifespan's."""
    return {
        "type": "http",
        "asgi": ASGI,
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "root_path": "",
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "state": state,
    }


def request_head_error(version: str, url: bytes, hosts: int) -> str:
    """Return the error of a parsed head with this number of Host fields (RFC 9112, 3.2); empty: none."""
    if b"#" in url:
        # Engines cut the fragment off: the router would check another path than the engine answers.
        return "The request target contains '#', which is no part of it: leave it out, or write %23."
    if hosts != 1 and (hosts or version == "1.1"):
        return f"The request has {hosts or 'no'} Host fields; HTTP/1.1 asks for exactly one."
    return ""


def request_scope(
    connection: dict[str, Any],
    version: str,
    method: bytes,
    url: bytes,
    headers: list[tuple[bytes, bytes]],
    headers_by_name: dict[bytes, bytes] | None = None,
) -> dict[str, Any]:
    """Return the scope of one request. Raises ``HttpParserInvalidURLError`` for an invalid absolute URL."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"?")
    elif url == b"*":
        raw_path, query = url, b""
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("latin-1")
    return {
        **connection,
        "http_version": version,
        "method": method.decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        HEADERS_BY_NAME: headers_by_name,
        "state": connection["state"].copy(),
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
