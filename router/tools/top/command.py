"""``kvatlas top``: asks a running router again and again and shows it; survives the router's restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import aiohttp
import msgspec
from rich.live import Live

from router.config.errors import ConfigError
from router.tools.console import output_console
from router.tools.doctor.command import router_url
from router.tools.doctor.gather.http import Http, HttpAnswer
from router.tools.ops_client import ops_headers
from router.tools.top.snapshot import RouterSnapshot, make_picture
from router.tools.top.table import render

_TIMEOUT_S = 3.0
_HINT = "q ends"


def run_top(router: str, *, interval_s: float, once: bool, as_json: bool) -> int:
    """0; 1 where a single picture could not be had. Raises ``ConfigError`` for arguments of no sense."""
    if not 0.05 <= interval_s <= 3600:
        raise ConfigError(f"--interval: {interval_s} is not in 0.05..3600")
    url = router_url(router)
    if url is None:
        raise AssertionError("a URL was given")
    terminal = sys.stdout.isatty() and sys.stdin.isatty()
    if once or not (terminal or as_json):
        return asyncio.run(_single(url, as_json=as_json))
    if as_json:
        asyncio.run(_lines(url, interval_s))
        return 0
    stdin = sys.stdin.fileno()
    with _single_keys(stdin):
        asyncio.run(_watch(url, interval_s, stdin))
    return 0


async def _single(url: str, *, as_json: bool) -> int:
    async with contextlib.aclosing(pictures(url, 1.0)) as stream:
        picture = await anext(stream)
    if as_json:
        _print_json(picture)
    else:
        output_console().print(render(picture))
    return 1 if picture.problem else 0


async def _lines(url: str, interval_s: float) -> None:
    async with contextlib.aclosing(pictures(url, interval_s)) as stream:
        async for picture in stream:
            _print_json(picture)


async def _watch(url: str, interval_s: float, terminal: int) -> None:
    """Show pictures until q is pressed on this terminal (its file descriptor)."""
    loop, quit_ = asyncio.get_running_loop(), asyncio.Event()

    def pressed() -> None:
        if os.read(terminal, 1) in {b"q", b"Q", b""}:
            quit_.set()

    with Live(screen=True, auto_refresh=False) as live:
        tasks = [asyncio.create_task(_show(url, interval_s, live)), asyncio.create_task(quit_.wait())]
        loop.add_reader(terminal, pressed)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(terminal)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _show(url: str, interval_s: float, live: Live) -> None:
    async with contextlib.aclosing(pictures(url, interval_s)) as stream:
        async for picture in stream:
            live.update(render(picture, hint=_HINT), refresh=True)


async def pictures(url: str, interval_s: float) -> AsyncGenerator[RouterSnapshot, None]:
    """A picture every ``interval_s``, for ever; one with a ``problem`` while the router does not answer."""
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        http = Http(session, _TIMEOUT_S)
        before: RouterSnapshot | None = None
        taken_s = 0.0
        while True:
            now = loop.time()
            picture = await take(http, url, before, now - taken_s)
            before, taken_s = (None if picture.problem else picture), now
            yield picture
            await asyncio.sleep(max(0.0, now + interval_s - loop.time()))


async def take(
    http: Http, url: str, before: RouterSnapshot | None = None, elapsed_s: float = 0.0
) -> RouterSnapshot:
    """One picture. Never raises for what the router answers, or does not."""
    paths = ("/kvatlas/engines", "/kvatlas/receipts", "/metrics")
    engines, receipts, metrics = await asyncio.gather(
        *(http.get(url + path, ops_headers()) for path in paths)
    )
    listed = _listed(engines)
    if listed is None:
        told = engines.what if not engines.ok else "an answer that is not a router's"
        return RouterSnapshot(router=url, problem=f"GET /kvatlas/engines: {told}")
    page = metrics.body.decode("utf-8", "replace") if metrics.ok else ""
    return make_picture(url, listed, _listed(receipts) or [], page, before=before, elapsed_s=elapsed_s)


def _listed(answer: HttpAnswer) -> list[Any] | None:
    return answer.json(list[Any]) if answer.ok else None


def _print_json(picture: RouterSnapshot) -> None:
    print(msgspec.json.encode(picture).decode(), flush=True)


@contextlib.contextmanager
def _single_keys(terminal: int) -> Iterator[None]:
    """Keys come as they are pressed, unseen; the terminal is put back at the end."""
    kept = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, kept)
