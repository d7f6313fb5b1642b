"""One page from an engine, read whole."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp

TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 16 << 20


def fetch(url: str) -> str:
    """The metrics page of an engine; a URL without a path is taken for its base. Raises ``OSError``."""
    whole = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/metrics"
    return asyncio.run(_fetch(whole))


async def _fetch(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            if answer.status != 200:
                raise OSError(f"{url} answered {answer.status}")
            page = await answer.content.read(PAGE_BYTES_MAX)
            if not answer.content.at_eof():
                raise OSError(f"{url}: more than {PAGE_BYTES_MAX} bytes")
            return page.decode("utf-8", errors="replace")
    except TimeoutError:
        raise OSError(f"{url} did not answer within {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise OSError(f"{url}: {error}") from None
