"""The client libraries of OpenAI and Anthropic, for servers of plain HTTP."""

from __future__ import annotations

import ssl
from types import ModuleType
from typing import Any

import openai

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading the system's authorities, which plain HTTP does not use, takes longer than most tests."""


def openai_client(url: str, *, key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
    """Client of ``url``/v1."""
    http = openai.DefaultAsyncHttpxClient(verify=_NO_AUTHORITIES)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries, http_client=http)


def anthropic_client(library: ModuleType, url: str, *, key: str = "none") -> Any:
    """Client of ``url`` without retries; ``library``: the fixture ``anthropic``, which imports it."""
    http = library.DefaultAsyncHttpxClient(verify=_NO_AUTHORITIES)
    return library.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=http)
