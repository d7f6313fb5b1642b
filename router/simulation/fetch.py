"""Inputs of a simulation: an engine's metrics page over HTTP, a router's usage record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from kvatlas.router.http.client import HttpClient, ResponseError
from kvatlas.router.http.error_texts import NotConnectedError
from kvatlas.router.tools.ops_client import ask, ops_headers, reason

TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 16 << 20
LOG_BYTES_MAX = 4 << 30
_ERROR_BYTES_MAX = 4096


def _refused(url: str, status: int, body: bytes) -> str:
    message = reason(body)
    return f"{url} answered {status}: {message}" if message else f"{url} answered {status}"


def fetch(url: str) -> str:
    """Return the metrics page of an engine; a URL without a path is its base. Raises ``OSError``."""
    whole = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/metrics"
    return _fetch(whole, {})


def fetch_from_router(url: str) -> str:
    """Return a page of a router's ops port. Raises ``OSError``."""
    return _fetch(url, ops_headers())


def _fetch(url: str, headers: dict[str, str]) -> str:
    status, body = ask(url, headers=headers, timeout_s=TIMEOUT_S, bytes_max=PAGE_BYTES_MAX)
    if status != 200:
        raise OSError(_refused(url, status, body[:_ERROR_BYTES_MAX]))
    return body.decode("utf-8", errors="replace")


def fetch_usage(router_url: str, path: Path) -> None:
    """Save the usage record of a running router to a file. Raises ``OSError``."""
    asyncio.run(_fetch_log(f"{router_url.rstrip('/')}/kvatlas/usage", path))


async def _fetch_log(url: str, path: Path) -> None:
    try:
        async with (
            HttpClient(ops_headers(), pause_s_max=TIMEOUT_S) as client,
            client.exchange("GET", url, None) as answer,
        ):
            if answer.status != 200:
                body = await answer.beginning(_ERROR_BYTES_MAX)
                if reason(body, "usage_off"):
                    raise OSError(
                        "the router writes no usage record: set usage.path there, or name a file here"
                    )
                raise OSError(_refused(url, answer.status, body))
            size = 0
            with path.open("wb") as file:
                async for piece in answer.pieces():
                    size += len(piece)
                    if size > LOG_BYTES_MAX:
                        raise OSError(f"{url}: more than {LOG_BYTES_MAX} bytes")
                    await asyncio.to_thread(file.write, piece)
    except TimeoutError:
        raise OSError(f"{url} sent nothing for {TIMEOUT_S:g} s") from None
    except (NotConnectedError, ResponseError, ValueError) as error:
        raise OSError(f"{url}: {error}") from None
