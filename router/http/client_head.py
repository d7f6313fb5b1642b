"""The head of a client's request: request line and fields (RFC 9112, section 3 and 5), gone through once.

Clients repeat their heads byte by byte, but for the length of the body: ``KnownHeads`` finds what was parsed
before by the bytes. Invariant: a line of a head that was parsed is its ``content-length``, and the parser
refuses another one, or a ``transfer-encoding`` beside it; so its body is what follows, and nothing else of
the head depends on the number.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import httptools
import msgspec

from kvatlas.router.openai.apis import PROMPT_APIS

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


_KNOWN_MAX = 1024
_KNOWN_BYTES_MAX = 4096
"""Of one head."""
_SEEN_MAX = 8192
_LENGTH_DIGITS_MAX = 12
_LENGTH_NAME_BYTES = len(b"\r\nContent-Length: ")


class KnownHeads:
    """Heads of requests with prompts that came more than once."""

    __slots__ = ("_by_bytes", "_seen")

    def __init__(self) -> None:
        self._by_bytes: dict[bytes, ClientHead] = {}
        # Hashes of those that came once: heads that are all different, as with a trace's id, push out none.
        self._seen: set[int] = set()

    def find(self, data: bytes, bytes_max: int) -> tuple[bytes, ClientHead | None, int]:
        """Return the key of the head of a request that came whole and alone, the head if it is known, and
        where the body begins; no key: it did not, or its length is not to be seen."""
        end = data.find(b"\r\n\r\n", 0, min(bytes_max, _KNOWN_BYTES_MAX))
        if end < 0:
            return b"", None, 0
        at = data.find(b"\r\nContent-Length: ", 0, end)
        if at < 0 and (at := data.find(b"\r\ncontent-length: ", 0, end)) < 0:
            return b"", None, 0
        at += _LENGTH_NAME_BYTES
        behind = data.index(b"\r\n", at)
        digits = data[at:behind]
        end += 4
        if not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX or len(data) - end != int(digits):
            return b"", None, 0
        key = data[:at] + data[behind:end]
        return key, self._by_bytes.get(key), end

    def keep(self, key: bytes, head: ClientHead) -> None:
        """Keep a head that came once before, if it may be used for another body."""
        if not head.keep_alive or head.method != "POST" or head.path not in PROMPT_APIS:
            return
        if (seen := hash(key)) not in self._seen:
            if len(self._seen) >= _SEEN_MAX:
                self._seen.clear()
            self._seen.add(seen)
            return
        if len(self._by_bytes) >= _KNOWN_MAX:
            del self._by_bytes[next(iter(self._by_bytes))]
        fields = [field for field in head.fields if field[0] != b"content-length"]
        self._by_bytes[key] = msgspec.structs.replace(head, fields=fields, by_name=dict(fields), sorted=None)
