"""``kvatlas top``: asks a running router again and again and shows it; survives the router's restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.live import Live

from router.config import ConfigError
from router.doctor.command import router_url
from router.doctor.http import Http, HttpAnswer
from router.tools.top_picture import Picture, make_picture
from router.tools.top_table import render

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
    with _keys() as pressed:
        asyncio.run(_watch(url, interval_s, pressed))
    return 0


async def _single(url: str, *, as_json: bool) -> int:
    async with contextlib.aclosing(pictures(url, 1.0)) as stream:
        picture = await anext(stream)
    if as_json:
        _print_json(picture)
    else:
        Console().print(render(picture))
    return 1 if picture.problem else 0


async def _lines(url: str, interval_s: float) -> None:
    async with contextlib.aclosing(pictures(url, interval_s)) as stream:
        async for picture in stream:
            _print_json(picture)


async def _watch(url: str, interval_s: float, pressed: Callable[[], str]) -> None:
    """Show pictures until q is pressed."""
    with Live(screen=True, auto_refresh=False) as live:
        watching = asyncio.create_task(_show(url, interval_s, live))
        try:
            while not watching.done() and pressed() not in {"q", "Q", "\x03"}:
                await asyncio.sleep(0.05)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _show(url: str, interval_s: float, live: Live) -> None:
    async with contextlib.aclosing(pictures(url, interval_s)) as stream:
        async for picture in stream:
            live.update(render(picture, hint=_HINT), refresh=True)


async def pictures(url: str, interval_s: float) -> AsyncIterator[Picture]:
    """A picture every ``interval_s``, for ever; one with a ``problem`` while the router does not answer."""
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        http = Http(session, _TIMEOUT_S)
        before: Picture | None = None
        taken_s = 0.0
        while True:
            now = loop.time()
            picture = await take(http, url, before, now - taken_s)
            before, taken_s = (None if picture.problem else picture), now
            yield picture
            await asyncio.sleep(max(0.0, now + interval_s - loop.time()))


async def take(http: Http, url: str, before: Picture | None = None, elapsed_s: float = 0.0) -> Picture:
    """One picture. Never raises for what the router answers, or does not."""
    paths = ("/kvatlas/engines", "/kvatlas/receipts", "/metrics")
    engines, receipts, metrics = await asyncio.gather(*(http.get(url + path) for path in paths))
    listed = _listed(engines)
    if listed is None:
        told = engines.what if not engines.ok else "an answer that is not a router's"
        return Picture(router=url, problem=f"GET /kvatlas/engines: {told}")
    page = metrics.body.decode("utf-8", "replace") if metrics.ok else ""
    return make_picture(url, listed, _listed(receipts) or [], page, before=before, elapsed_s=elapsed_s)


def _listed(answer: HttpAnswer) -> list[Any] | None:
    return answer.json(list[Any]) if answer.ok else None


def _print_json(picture: Picture) -> None:
    print(msgspec.json.encode(picture).decode(), flush=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """A function that gives the key pressed meanwhile ("" for none); the terminal is put back at the end."""
    descriptor = sys.stdin.fileno()
    kept = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], 0)
        return os.read(descriptor, 1).decode("latin-1") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, kept)
