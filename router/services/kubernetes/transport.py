"""Transport below lightkube: size limits, bookmarks, reasons of refusals, and CA rotation.

Invariants: every read is bounded; a watch yields complete lines only, so a connection that breaks within a
line yields all lines before it; a watch ends with ``WatchEndedError``, where lightkube by itself would start
the next one at once, without end; no error text contains a secret.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import msgspec
from lightkube import AsyncClient, ConfigError, SingleConfig

from kvatlas.router.openai.errors import retry_after_s
from kvatlas.router.services.kubernetes.access import AccessError, read_authority, verifying

_CONNECT_S = 10.0
_ANSWER_S = 30.0
_PAGE_BYTES_MAX = 64 << 20
_LINE_BYTES_MAX = 8 << 20
_ERROR_BYTES_MAX = 16 * 1024
_RETRY_AFTER_S_MAX = 60.0
# Line ends for httpx2, but not for JSON: replaced by their JSON escapes.
_LINE_ENDS = {text.encode(): f"\\u{ord(text):04x}".encode() for text in "\x85\u2028\u2029"}


class RefusedError(Exception):
    """The API server refused. ``retry_after_s``: the pause it requested, 0 if it did not."""

    def __init__(self, status: int, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


class BadAnswerError(Exception):
    """The answer does not come from a Kubernetes API."""


class WatchEndedError(Exception):
    """The API server ended a watch, as it does after the requested time."""


class LineSplitter:
    """Splits bytes into complete lines. Raises ``BadAnswerError`` for a line over the limit."""

    def __init__(self, bytes_max: int = _LINE_BYTES_MAX) -> None:
        self._rest = b""
        self._bytes_max = bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._bytes_max:
            raise BadAnswerError(f"a line of the watch is over {self._bytes_max} bytes")
        return [line for line in lines if line.strip()]


def make_client(config: SingleConfig) -> AsyncClient:
    """Make lightkube's client on an ``ApiTransport``. Raises ``AccessError``."""
    # Lightkube checks the same, but does not name the unusable file.
    verifying(config)
    timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
    try:
        return AsyncClient(config, timeout=timeout, trust_env=False, transport=ApiTransport(config))
    except ConfigError as error:
        raise AccessError(f"fleet.kubernetes.kubeconfig: {error}") from None


class ApiTransport(httpx2.AsyncBaseTransport):
    """Transport with these limits; ``config`` names the trusted CA."""

    def __init__(self, config: SingleConfig) -> None:
        self._config = config
        self._authority: bytes | None = None
        self._inner: httpx2.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raise ``RefusedError`` for every status but 200, and 401, on which lightkube logs in again; also
        ``BadAnswerError``, ``AccessError`` or ``httpx2.HTTPError``."""
        if not request.headers.get("authorization", " ").isprintable():
            return _unauthorized("the token is not one line of text; see its file or login plug-in")
        watching = "watch" in request.url.params
        if watching:
            request.url = request.url.copy_add_param("allowWatchBookmarks", "true")
        answer = await (await self._trusting()).handle_async_request(request)
        if watching and answer.status_code == 200:
            return httpx2.Response(200, stream=_Lines(answer))
        asked = f"{request.method} {request.url.path}"
        try:
            if answer.status_code == 200:
                body = await _read(answer, _PAGE_BYTES_MAX)
                if len(body) > _PAGE_BYTES_MAX:
                    raise BadAnswerError(f"{asked}: a page is over {_PAGE_BYTES_MAX} bytes")
                return httpx2.Response(200, content=body)
            refused = await _refused(answer, asked)
        finally:
            await answer.aclose()
        if refused.status == 401:
            return _unauthorized(str(refused))
        raise refused

    async def aclose(self) -> None:
        """Close every connection."""
        if self._inner is not None:
            await self._inner.aclose()

    async def _trusting(self) -> httpx2.AsyncHTTPTransport:
        """Return connections that trust the current CA; if it changed, new ones."""
        authority = read_authority(self._config)
        if self._inner is None or authority != self._authority:
            old, self._authority = self._inner, authority
            limits = httpx2.Limits(max_connections=None)  # each watch occupies one
            self._inner = httpx2.AsyncHTTPTransport(verify=verifying(self._config), limits=limits)
            if old is not None:
                await old.aclose()
        return self._inner


def _unauthorized(text: str) -> httpx2.Response:
    """Make lightkube log in again, and then fail with this text."""
    return httpx2.Response(401, headers={"content-type": "text/plain"}, content=text)


class _Lines(httpx2.AsyncByteStream):
    def __init__(self, answer: httpx2.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        splitter = LineSplitter()
        async for piece in self._answer.aiter_bytes():
            for line in splitter.feed(piece):
                for end, escaped in _LINE_ENDS.items():
                    line = line.replace(end, escaped)  # noqa: PLW2901
                yield line + b"\n"
        raise WatchEndedError

    async def aclose(self) -> None:
        await self._answer.aclose()


class _Status(msgspec.Struct):
    message: str = ""


async def _refused(answer: httpx2.Response, asked: str) -> RefusedError:
    body = await _read(answer, _ERROR_BYTES_MAX)
    try:
        said = msgspec.json.decode(body[:_ERROR_BYTES_MAX], type=_Status).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = ""
    verbs = "patch" if asked.startswith("PATCH") else "get, list and watch"
    hint = {
        401: "the token was refused",
        403: f"the service account needs {verbs} here (ClusterRole for all namespaces)",
    }.get(answer.status_code, "")
    text = f"{asked}: status {answer.status_code}" + "".join(f"; {more}" for more in (said, hint) if more)
    asked_s = retry_after_s(answer.headers.get("retry-after"), _RETRY_AFTER_S_MAX)
    return RefusedError(answer.status_code, text, asked_s)


async def _read(answer: httpx2.Response, bytes_max: int) -> bytes:
    """Read the body, or a little more than ``bytes_max`` of it."""
    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > bytes_max:
            break
    return bytes(body)
