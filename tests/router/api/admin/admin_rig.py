"""A router with an admin API before simulated engines, and what its log says."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from kvatlas.router.api.admin_auth import AdminSettings
from tests.support.whole_router import Rig, configure, routing

TOKEN = "ann-0123456789abcdef"
OTHER = "bob-0123456789abcdef"


def token_file(tmp_path: Path, text: str = f"# who may\nann:{TOKEN}\nbob:{OTHER}\n") -> str:
    path = tmp_path / "tokens"
    path.write_text(text)
    return str(path)


class Admin:
    """A client of the admin API."""

    def __init__(self, url: str, session: aiohttp.ClientSession, rig: Rig) -> None:
        self.url = url
        self.rig = rig
        self._session = session

    async def ask(
        self,
        method: str,
        path: str = "",
        body: Any = None,
        *,
        token: str | None = TOKEN,
        raw: bytes | None = None,
        **options: Any,
    ) -> tuple[int, Any, Any]:
        """Status, body, headers."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        url = f"{self.url}/admin/engines{path}"
        if raw is not None:
            options["data"] = raw
        elif body is not None:
            options["json"] = body
        async with self._session.request(method, url, headers=headers, **options) as answer:
            return answer.status, await answer.json(), answer.headers

    async def listed(self) -> dict[str, Any]:
        status, body, _ = await self.ask("GET")
        assert status == 200
        return {engine["engine"]: engine for engine in body["engines"]}


@asynccontextmanager
async def administered(
    tmp_path: Path, *engines: Any, tls: ssl.SSLContext | None = None, changes: Any = None, **settings: Any
) -> AsyncIterator[Admin]:
    """``settings`` are the admin API's; ``changes`` those of the rest of the configuration."""
    given: dict[str, Any] = {"enabled": True, "token_file": token_file(tmp_path), **settings}
    config = configure(*engines, admin=AdminSettings(**given), **(changes or {}))
    connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    async with routing(config, wait=False) as rig, aiohttp.ClientSession(connector=connector) as session:
        office = rig.router.admin
        url = rig.url
        if office.server is not None:
            url = f"{'https' if tls is not None else 'http'}://127.0.0.1:{office.server.port}"
        yield Admin(url, session, rig)


@contextmanager
def audited() -> Iterator[list[dict[str, Any]]]:
    """Lines of the audit log meanwhile."""
    with structlog.testing.capture_logs() as logs:
        lines: list[dict[str, Any]] = []
        yield lines
        lines += [dict(line) for line in logs if line["event"] == "admin"]
