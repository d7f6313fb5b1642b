"""Shared parts of the tools: a router's ops port, error messages, signals, the simulated engine, tables."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error

# Environment variable with the token of a router that requires one (``server.ops_token_file``).
TOKEN_VARIABLE = "KVATLAS_OPS_TOKEN"  # noqa: S105  # its name
OPS_PORT_HINT = (
    "start the router, or give --router the URL of its ops port (server.ops_port, 9001 where not set)"
)
_TEXT_MAX = 300


def ops_headers() -> dict[str, str]:
    """Return headers for a router's ops port; never send them anywhere else."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}


def router_url(text: str) -> str:
    """Return the router's base URL. Raises ``ConfigError`` if it is invalid."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--router {text!r}: expected http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def reason(body: bytes, code: str = "") -> str:
    """Return the message of an OpenAI-style error (with this code, if given); "" if it is not one."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"])[:_TEXT_MAX] if code in {"", error.get("code")} else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return ""


def ask(
    url: str,
    *,
    timeout_s: float,
    bytes_max: int,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send one GET, or a POST with ``body``; return the status and the whole response. ``timeout_s``
    includes reading it. Raises ``OSError``, which names the URL."""

    async def exchange() -> tuple[int, bytes]:
        method = "GET" if body is None else "POST"
        async with HttpClient(headers) as client, client.exchange(method, url, timeout_s, body) as answer:
            return answer.status, await answer.body(bytes_max)

    try:
        return asyncio.run(exchange())
    except TimeoutError:
        raise OSError(f"{url}: no complete answer within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise OSError(f"{url}: {describe_error(error)}") from None


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at SIGINT and SIGTERM, inside a running loop."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


# Wider than any table: lines are never folded, so that output can be grepped.
WIDTH_PIPED = 1000
# Options of a table that is drawn again and again in 80 columns.
LIVE_STYLE: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": 0}


def make_table(*columns: str, gap: int = 2, min_width: int | None = None, **options: Any) -> Table:
    """Return a table without rows.

    A column named ``>name`` is aligned right and, like one named ``<name``, never folded; any other one is
    folded, but has at least ``min_width`` characters. ``options`` are those of ``rich.table.Table``.
    """
    table = Table(**{"box": None, "padding": (0, gap, 0, 0)} | options)
    for column in columns:
        kind = column[:1] if column[:1] in {"<", ">"} else ""
        table.add_column(
            column.removeprefix(kind),
            justify="right" if kind == ">" else "left",
            no_wrap=bool(kind),
            overflow="ellipsis" if kind else "fold",
            min_width=None if kind else min_width,
        )
    return table


def output_console() -> Console:
    """Return a console on standard output: as wide as the terminal, or unfolded for files and pipes.

    ``COLUMNS`` in the environment overrides the width.
    """
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(width=WIDTH_PIPED)
