"""What a simulation is told over HTTP: an engine's metrics page, a router's usage record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from router.tools.ops_client import ops_headers, reason

TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 16 << 20
LOG_BYTES_MAX = 4 << 30
_ERROR_BYTES_MAX = 4096


def _refused(url: str, status: int, body: bytes) -> str:
    message = reason(body)
    return f"{url} answered {status}: {message}" if message else f"{url} answered {status}"


def fetch(url: str) -> str:
    """The metrics page of an engine; a URL without a path is taken for its base. Raises ``OSError``."""
    whole = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/metrics"
    return asyncio.run(_fetch(whole, {}))


def fetch_from_router(url: str) -> str:
    """A page of a router's ops port. Raises ``OSError``."""
    return asyncio.run(_fetch(url, ops_headers()))


async def _fetch(url: str, headers: dict[str, str]) -> str:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(url) as answer,
        ):
            if answer.status != 200:
                raise OSError(_refused(url, answer.status, await answer.content.read(_ERROR_BYTES_MAX)))
            page = await answer.content.read(PAGE_BYTES_MAX)
            if not answer.content.at_eof():
                raise OSError(f"{url}: more than {PAGE_BYTES_MAX} bytes")
            return page.decode("utf-8", errors="replace")
    except TimeoutError:
        raise OSError(f"{url} did not answer within {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise OSError(f"{url}: {error}") from None


def fetch_usage(router_url: str, path: Path) -> None:
    """Put the usage record of a running router into a file. Raises ``OSError``."""
    asyncio.run(_fetch_log(f"{router_url.rstrip('/')}/kvatlas/usage", path))


async def _fetch_log(url: str, path: Path) -> None:
    timeout = aiohttp.ClientTimeout(total=None, connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=ops_headers()) as session,
            session.get(url) as answer,
        ):
            if answer.status != 200:
                body = await answer.content.read(_ERROR_BYTES_MAX)
                if reason(body, "usage_off"):
                    raise OSError(
                        "the router writes no usage record: set usage.path there, or name a file here"
                    )
                raise OSError(_refused(url, answer.status, body))
            size = 0
            with path.open("wb") as file:
                async for piece in answer.content.iter_any():
                    size += len(piece)
                    if size > LOG_BYTES_MAX:
                        raise OSError(f"{url}: more than {LOG_BYTES_MAX} bytes")
                    await asyncio.to_thread(file.write, piece)
    except TimeoutError:
        raise OSError(f"{url} said nothing for {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise OSError(f"{url}: {error}") from None
