"""HTTP requests of the router itself to engines and render servers.

Two clients: one with the router's key, for its own requests, and one without, for requests on behalf of a
client, who may have no key. Both exist only within ``open``; outside of it ``post`` and ``healthy`` fail as
if the engine were down.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvatlas.router.fleet.poller import ANSWER_BYTES_MAX
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.tls import Certificates, TlsFiles, client_context


class EngineCalls:
    """``health_timeout_s`` limits a request of ``/health``."""

    def __init__(
        self,
        headers: dict[str, str],
        tls: ssl.SSLContext,
        *,
        health_timeout_s: float,
    ) -> None:
        self._headers = headers
        self._tls = tls
        self._health_timeout_s = health_timeout_s
        self._in_clients_names: HttpClient | None = None
        self._own: HttpClient | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpClient]:
        """Open the clients; ``post`` and ``healthy`` work within the context."""
        async with HttpClient(self._headers, self._tls) as own, HttpClient(tls=self._tls) as others:
            self._own, self._in_clients_names = own, others
            try:
                yield own
            finally:
                self._own = self._in_clients_names = None

    async def post(
        self, url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Post a JSON body on behalf of a client. Returns status and body. Raises ``OSError``."""
        return await self._send(self._in_clients_names, "POST", url, body, headers, timeout_s)

    async def ask(
        self, url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Post a JSON body with the router's key, for its own requests."""
        return await self.send("POST", url, body, headers, timeout_s)

    async def send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request with the router's key."""
        return await self._send(self._own, method, url, body, headers, timeout_s)

    async def _send(
        self,
        client: HttpClient | None,
        method: str,
        url: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        if client is None:
            raise OSError("the router is not running")
        headers = {"content-type": "application/json", **headers}
        try:
            async with client.exchange(method, url, timeout_s, body, headers) as answer:
                return answer.status, await answer.body(ANSWER_BYTES_MAX)
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(f"{url}: {describe_error(error)}") from error

    async def healthy(self, url: str) -> bool:
        """Whether ``/health`` of the server at ``url`` returns 200."""
        client = self._in_clients_names
        if client is None:
            return False
        try:
            async with client.exchange("GET", f"{url}/health", self._health_timeout_s) as answer:
                return answer.status == 200
        except OSError:
            return False


def hold_engine_tls(certificates: Certificates, files: TlsFiles) -> ssl.SSLContext:
    """Yield the SSL context for ``https://`` engines, reloaded when its files change. Raises ``TlsError`` for
    unusable files."""
    keys = "fleet.ca_file, client_cert_file or client_key_file"
    return certificates.add(client_context(files, keys), files, keys)
