"""The ASGI scope of a request: what its connection knows, and what its head says."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools

from router.http.server.seam import TOLD

ASGI = {"version": "3.0", "spec_version": "2.4"}


def connection_scope(transport: asyncio.BaseTransport, state: dict[str, Any]) -> dict[str, Any]:
    """The part that all requests of a connection share. ``state`` is the lifespan's."""
    return {
        "type": "http",
        "asgi": ASGI,
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "root_path": "",
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "state": state,
    }


def head_problem(version: str, url: bytes, hosts: int) -> str:
    """What is wrong with a head that could be parsed, with so many Host fields; empty: nothing."""
    if b"#" in url:
        # Engines cut the fragment off, so that a path would be judged here and another one be answered there.
        return "The request target contains '#', which is no part of it: leave it out, or write %23."
    if hosts != 1 and (hosts or version == "1.1"):
        return f"The request has {hosts} Host fields; HTTP/1.1 asks for exactly one."
    return ""


def request_scope(
    connection: dict[str, Any],
    version: str,
    method: bytes,
    url: bytes,
    headers: list[tuple[bytes, bytes]],
    told: dict[bytes, bytes] | None = None,
) -> dict[str, Any]:
    """The scope of one request. Raises ``HttpParserInvalidURLError`` for an absolute URL that is none."""
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
        TOLD: told,
        "state": connection["state"].copy(),
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
