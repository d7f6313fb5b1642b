"""The router's own questions to engines and render servers: TLS, sessions, answers of bounded size.

Two sessions: one with the router's key, for what the router asks for itself, and one without, for what it
asks in a client's name, who may have no key. Both live as long as ``open`` lasts; outside of it ``post`` and
``healthy`` fail as if the engine were away.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from router.http.tls import Certificates, TlsFiles, client_context


class EngineCalls:
    """``answer_bytes_max`` bounds an answer to ``post``, ``health_timeout_s`` a look at ``/health``."""

    def __init__(
        self,
        headers: dict[str, str],
        tls: ssl.SSLContext,
        *,
        answer_bytes_max: int,
        health_timeout_s: float,
    ) -> None:
        self._headers = headers
        self._tls = tls
        self._answer_bytes_max = answer_bytes_max
        self._health_timeout = aiohttp.ClientTimeout(total=health_timeout_s)
        self._in_clients_names: aiohttp.ClientSession | None = None
        self._own: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The session with the router's key; meanwhile ``post`` and ``healthy`` work."""
        async with self._session(self._headers) as own, self._session() as in_clients_names:
            self._own, self._in_clients_names = own, in_clients_names
            try:
                yield own
            finally:
                self._own = self._in_clients_names = None

    async def post(
        self, url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON body, asked in a client's name. Raises ``OSError``."""
        return await self._post(self._in_clients_names, url, body, headers, timeout_s)

    async def ask(
        self, url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """The same with the router's key, for what it asks for itself."""
        return await self._post(self._own, url, body, headers, timeout_s)

    async def _post(
        self,
        session: aiohttp.ClientSession | None,
        url: str,
        body: bytes,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        if session is None:
            raise OSError("the router is not running")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"content-type": "application/json", **headers}
        try:
            async with session.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return answer.status, await self._read(url, answer)
        except aiohttp.ClientError as error:
            raise OSError(f"{url}: {error}") from error

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > self._answer_bytes_max:
                raise OSError(f"{url}: answer over answer_bytes_max = {self._answer_bytes_max}")
        return b"".join(pieces)

    async def healthy(self, url: str) -> bool:
        """Whether ``/health`` of the server at ``url`` says 200."""
        session = self._in_clients_names
        if session is None:
            return False
        try:
            async with session.get(
                f"{url}/health", timeout=self._health_timeout, allow_redirects=False
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _session(self, headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._tls)
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=headers
        )


def hold_engine_tls(certificates: Certificates, files: TlsFiles) -> ssl.SSLContext:
    """The context of connections to ``https://`` engines, kept up to date. Raises ``TlsError`` for files of
    no use."""
    keys = "fleet.ca_file, client_cert_file or client_key_file"
    return certificates.hold(client_context(files, keys), files, keys)
