"""List and watch against the Kubernetes API, as bytes and small structs; no client library (decision 007).

Always true: nothing is read beyond a bound; a watch gives whole lines only, so a connection that breaks in
the middle of one gives what came before it; errors of the API server are told with their status, its own
words, and how long it asked to be left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec

from router.fleet.sources.kubernetes.access import Access
from router.fleet.sources.kubernetes.objects import Page, Status
from router.openai.errors import retry_after_s

_CONNECT_S = 10.0
_ANSWER_S = 30.0
_SILENCE_S = 15.0
"""How much later than promised the end of a watch may come."""
_PAGE = 250
_PAGE_BYTES_MAX = 64 << 20
_LINE_BYTES_MAX = 8 << 20
_ERROR_BYTES_MAX = 16 * 1024
_RETRY_AFTER_S_MAX = 60.0


class RefusedError(Exception):
    """The API server said no. ``retry_after_s`` is what it asked for, 0 where it did not say."""

    def __init__(self, status: int, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


class BadAnswerError(Exception):
    """An answer that is no Kubernetes API's."""


class LineSplitter:
    """Bytes in, whole lines out. Raises ``BadAnswerError`` for a line without end."""

    def __init__(self, bytes_max: int = _LINE_BYTES_MAX) -> None:
        self._rest = b""
        self._bytes_max = bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._bytes_max:
            raise BadAnswerError(f"a line of the watch is over {self._bytes_max} bytes")
        return [line for line in lines if line.strip()]


class KubeClient:
    """See the module. ``session`` must be this client's own: it carries no headers of others."""

    def __init__(self, session: aiohttp.ClientSession, access: Access) -> None:
        self._session = session
        self._access = access

    async def pages(self, path: str, selector: str) -> AsyncIterator[Page]:
        """Every page of a list. Raises ``RefusedError`` (410: the list changed too much meanwhile, begin
        again), ``BadAnswerError``, ``aiohttp.ClientError``, ``TimeoutError`` or ``AccessError``."""
        params = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            page = await self._page(path, params)
            yield page
            if not page.metadata.continue_:
                return
            params["continue"] = page.metadata.continue_

    async def _page(self, path: str, params: Mapping[str, str]) -> Page:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S)
        async with self._get(path, params, timeout) as answer:
            await _check(answer, path)
            body = await _read(answer, _PAGE_BYTES_MAX)
            if len(body) > _PAGE_BYTES_MAX:
                raise BadAnswerError(f"GET {path}: a page is over {_PAGE_BYTES_MAX} bytes")
        try:
            return msgspec.json.decode(body, type=Page)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadAnswerError(f"GET {path}: {error}") from None

    async def watch(self, path: str, selector: str, version: str, watch_s: float) -> AsyncIterator[bytes]:
        """Lines of a watch from ``version`` on, until the API server ends it. Raises as ``pages`` does."""
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(watch_s))),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=watch_s + _SILENCE_S)
        splitter = LineSplitter()
        async with self._get(path, params, timeout) as answer:
            await _check(answer, path)
            async for piece in answer.content.iter_any():
                for line in splitter.feed(piece):
                    yield line

    def _get(
        self, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client._RequestContextManager:
        return self._session.get(
            self._access.base_url + path,
            params=params,
            headers={"accept": "application/json", **self._access.headers()},
            ssl=self._access.tls(),
            timeout=timeout,
            allow_redirects=False,
        )


async def _check(answer: aiohttp.ClientResponse, path: str) -> None:
    if answer.status == 200:
        return
    body = await _read(answer, _ERROR_BYTES_MAX)
    try:
        said = msgspec.json.decode(body[:_ERROR_BYTES_MAX], type=Status).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = ""
    hint = {
        401: "the token was refused",
        403: "the service account needs get, list and watch here (ClusterRole for all namespaces)",
    }.get(answer.status, "")
    text = f"GET {path}: status {answer.status}" + "".join(f"; {more}" for more in (said, hint) if more)
    raise RefusedError(
        answer.status, text, retry_after_s(answer.headers.get("retry-after"), _RETRY_AFTER_S_MAX)
    )


async def _read(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body, or one byte more than ``bytes_max`` of it."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > bytes_max:
            break
    return bytes(body)
