"""``kvatlas top`` before a real router, before one that goes away, and on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvatlas.router.tools.top import _single_keys, render, snapshots
from kvatlas.router.tools.top_snapshot import EngineRow, RouterSnapshot, make_snapshot
from tests.router.tools.doctor.rig import http_server
from tests.support.examples import examples
from tests.support.paths import ROOT
from tests.support.whole_router import configure, routing, running

TOP = [sys.executable, "-m", "kvatlas", "top"]
GONE = "http://127.0.0.1:9"


def shown(snapshot: RouterSnapshot) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render(snapshot, hint="q ends"))
        return console.export_text()


async def test_a_running_router() -> None:
    async with running({}, {"publish_events": False}) as engines, routing(configure(*engines)) as rig:
        async with aclosing(snapshots(rig.ops_url, 0.05)) as stream:
            first = await anext(stream)
            taken_s = asyncio.get_running_loop().time()
            for _ in range(3):
                await rig.chat("tell a story " * 40)
            snapshot = await anext(stream)
            passed_s = asyncio.get_running_loop().time() - taken_s
        began = asyncio.get_running_loop().time()
        async with aclosing(snapshots(rig.ops_url, 1.0)) as seldom:
            assert [len((await anext(seldom)).engines) for _ in range(2)] == [2, 2]
        assert 1.0 <= asyncio.get_running_loop().time() - began < 2.0
        assert [row.engine for row in snapshot.engines] == [e.base_url for e in engines]
        assert all(row.up and not row.breaker_open for row in snapshot.engines)
        events, silent = snapshot.engines
        assert (events.feed, silent.feed, silent.mode) == ("ready", "none", "shadow")
        totals = snapshot.totals
        assert first.totals is not None
        assert totals is not None
        assert (first.totals.requests, totals.requests) == (0, 3)
        assert totals.requests_per_s is not None
        assert totals.requests_per_s == pytest.approx(3 / passed_s, rel=0.3)
        assert totals.hit_share is not None
        assert totals.hit_share > 0.5
        assert (totals.active, totals.errors, totals.retries) == (0, 0, 0)
        text = shown(snapshot)
        assert engines[0].base_url.removeprefix("http://") in text
        assert "total" in text


async def test_a_router_that_goes_away_and_comes_back() -> None:
    answers: dict[str, Any] = {}
    here = {"/kvatlas/engines": [{"engine": "http://e:1", "up": True, "receipts": {"exact": 5}}]}

    async with http_server(answers) as url, aclosing(snapshots(url, 0.05)) as stream:
        answers.update(here)
        assert (await anext(stream)).engines
        answers.clear()
        snapshot = await anext(stream)
        assert snapshot.problem == "GET /kvatlas/engines: status 404"
        assert snapshot.problem in shown(snapshot)
        answers.update(here)
        snapshot = await anext(stream)
        assert snapshot.engines[0].requests_per_s is None, "a restarted router has no rate yet"
        assert (await anext(stream)).engines[0].requests_per_s == 0


def test_states_that_matter_are_shown() -> None:
    entries = [
        {"engine": "http://a:1", "up": False, "problem": "refused"},
        {"engine": "http://b:1", "up": True, "available": False},
        {
            "engine": "http://c:1",
            "up": True,
            "feed_state": "degraded",
            "feed": {"reason": "gap", "lag_s": 0.25},
            "kv_usage": 0.5,
            "kv_cached": 0.87,
            "load": {"queue_s": 1.5, "running": 3, "waiting": 4},
        },
    ]
    problems = {
        "http://a:1": [{"severity": "error", "seen": "down: refused"}],
        "http://b:1": [{"severity": "warning", "seen": "predictions drift"}],
        "http://c:1": [
            {"severity": "info", "seen": "sleeps"},
            {"severity": "warning", "seen": "feed degraded"},
        ],
        "m": [{"severity": "warning", "seen": "m: its prompts are tokenized by engines"}],
    }
    history = {"intervals": [{"errors": 2}, {"errors": 1}]}
    snapshot = make_snapshot("http://r", entries, [], "", problems=problems, history=history)
    text = shown(snapshot)
    assert "sleeps" not in text
    for words in (
        "problems: 1 error, 3 warnings",
        "a:1: down: refused",
        "b:1: predictions drift",
        "c:1: feed degraded",
        "\nm: its prompts",
        "3 errors in 5 min",
        "feed degraded 250 ms late",
        "50%",
        "87%",
        "1.50 s",
        "2 up",
    ):
        assert words in text
    many = {"m": [{"severity": "error", "seen": f"fault {number}."} for number in range(23)]}
    text = shown(make_snapshot("http://r", entries, [], "", problems=many))
    assert "fault 19." in text
    assert "fault 20." not in text
    assert "\n3 more: kvatlas doctor" in text


def test_figures_of_engines_and_of_all() -> None:
    entries = [
        {
            "engine": "http://a:1",
            "up": True,
            "receipts": {"exact": 3, "over": 1, "unpredicted": 16},
            "first_tokens": {"predicted_s": 0.5, "measured_s": 0.75, "accurate": 1, "compared": 2},
            "load": {"running": 1, "waiting": 2},
            "feed": {"lag_s": 0.09},
            "drifting": True,
        },
        {"engine": "http://b:1", "up": True, "receipts": {"exact": 4}, "load": {"running": 3, "waiting": 4}},
    ]
    receipts = [
        {"engine_id": "http://a:1", "actual_tokens": 30, "prompt_tokens": 100},
        {"engine_id": "http://a:1", "actual_tokens": 50, "prompt_tokens": 100},
        {"engine_id": "http://b:1", "actual_tokens": 0, "prompt_tokens": 200},
        {"engine_id": "http://b:1", "actual_tokens": None, "prompt_tokens": 200},
    ]
    page = 'kvatlas_proxy_requests_active 2\nkvatlas_proxy_retries_total{reason="a"} 3\n'
    page += 'kvatlas_proxy_retries_total{reason="b"} 4\nkvatlas_other 9\n'
    before = make_snapshot("http://r", [{**entries[0], "receipts": {"exact": 10}}], [], "")
    snapshot = make_snapshot("http://r", entries, receipts, page, before=before, elapsed_s=4.0)
    lines = [line.split() for line in shown(snapshot).splitlines()]
    first, second, total = (
        next(line for line in lines if line[:1] == [name]) for name in ("a:1", "b:1", "total")
    )
    assert first[1:] == ["20", "2.5", "40%", "75%", "-", "1", "2", "-", "-", "-", "drift"]
    assert second[1:] == ["4", "-", "0%", "100%", "-", "3", "4", "-", "-", "-", "up"]
    assert total[1:] == ["24", "2.5", "20%", "88%", "-", "4", "6", "-", "-", "2", "up"]
    assert "requests: 2 active, - errors in 5 min, 7 retries since the start" in shown(snapshot)
    assert ["a:1", "0.50", "s", "0.75", "s", "50%", "of", "2"] in lines
    assert [line[0] for line in lines if line].count("b:1") == 1, "no first token of it was compared"
    assert "late" not in shown(snapshot)
    restarted = make_snapshot("http://r", [entries[1]], [], "", before=snapshot, elapsed_s=4.0)
    assert (restarted.engines[0].requests_per_s, restarted.totals and restarted.totals.retries) == (0, None)


def test_a_table_with_a_dead_engine_fits_80_columns() -> None:
    problem = "cannot connect: Connect call failed ('127.0.0.1', 9) " * 3
    dead = {"engine": "http://127.0.0.1:33043", "up": False, "problem": problem, "feed_state": "down"}
    live = {
        "engine": "http://127.0.0.1:33044",
        "up": True,
        "receipts": {"exact": 12_345},
        "load": {"queue_s": 12.34, "running": 64, "waiting": 128},
        "kv_usage": 1.0,
        "kv_cached": 1.0,
        "feed_state": "ready",
        "mode": "native",
    }
    found = {dead["engine"]: [{"severity": "error", "seen": f"down: {problem}"}]}
    snapshot = make_snapshot("http://127.0.0.1:8000", [dead, live], [], "", problems=found)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render(snapshot))
    lines = console.export_text().splitlines()
    rows = [line for line in lines if line.startswith("127.0.0.1:3304")]
    assert "…" not in "".join(lines)
    assert [len(row.split()) for row in rows[:2]] == [12, 13], "one line per engine, every figure whole"
    assert rows[1].split()[1:] == [
        "12,345",
        "-",
        "-",
        "100%",
        "12.34",
        "s",
        "64",
        "128",
        "100%",
        "100%",
        "ready",
        "native",
    ]
    assert any("down: cannot connect" in line for line in lines)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *EngineRow.__struct_fields__,
        "receipts",
        "load",
        "available",
        "feed_state",
        "engine_id",
        "actual_tokens",
        "prompt_tokens",
    ]
)
ENTRIES = st.lists(ANYTHING | st.dictionaries(FIELDS, ANYTHING), max_size=3)


@settings(max_examples=examples(150))
@given(engines=ENTRIES, receipts=ENTRIES, metrics=st.text(max_size=60), problems=ANYTHING, history=ANYTHING)
def test_whatever_a_router_answers_is_a_picture(
    engines: list[Any], receipts: list[Any], metrics: str, problems: Any, history: Any
) -> None:
    told = {"problems": problems, "history": {"intervals": history}}
    snapshot = make_snapshot("http://r", engines, receipts, metrics, **told)
    shown(make_snapshot("http://r", engines, receipts, metrics, before=snapshot, elapsed_s=1.0, **told))


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--router", "nonsense"], "--router 'nonsense': expected http://HOST:PORT"),
        (["--router", "http://h:99999"], "expected http://HOST:PORT"),
        (["--interval", "0"], "--interval: 0.0 is not 0.05 to 3600"),
        (["--interval", "nan"], "--interval: nan"),
    ],
)
def test_bad_arguments(
    arguments: list[str], told: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = kvatlas("top", *arguments)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_a_router_the_remedy_is_shown(
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    ended = kvatlas("top", "--once", "--router", GONE)
    assert ended.returncode == 1
    assert "connection refused; start the router, or give --router" in " ".join(ended.stdout.split())


@pytest.mark.process
def test_without_a_terminal_one_picture_and_a_status() -> None:
    ended = top("--router", GONE)
    assert ended.returncode == 1
    assert "cannot connect" in ended.stdout
    ended = top("--router", GONE, "--once", "--json")
    assert ended.returncode == 1
    assert "cannot connect" in json.loads(ended.stdout)["problem"]


def _default_sigint() -> None:
    """In the background of a shell SIGINT is ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """``kvatlas top`` on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._main, side = pty.openpty()
        self.process = subprocess.Popen(
            [*TOP, *arguments],
            cwd=ROOT,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=_default_sigint,  # noqa: PLW1509  # this process has no other threads that matter
        )
        os.close(side)
        self.seen = b""

    def until(self, condition: Callable[[bytes], bool]) -> None:
        while not condition(self.seen):
            self.seen += os.read(self._main, 65536)

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def wait(self) -> int:
        """The exit status; reads on, so that the process can write its end."""
        with contextlib.suppress(OSError):  # the other side has closed
            while data := os.read(self._main, 65536):
                self.seen += data
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)


def test_keys_are_read_one_by_one_and_the_terminal_is_left_as_it_was() -> None:
    main, side = pty.openpty()
    try:
        before = termios.tcgetattr(side)
        with _single_keys(side):
            assert not termios.tcgetattr(side)[3] & (termios.ICANON | termios.ECHO)
        assert termios.tcgetattr(side) == before
    finally:
        os.close(main)
        os.close(side)


def test_on_a_terminal_q_ends_it() -> None:
    terminal = Terminal("--router", GONE, "--interval", "0.1")
    try:
        terminal.until(lambda seen: seen.count(b"cannot connect") >= 2)
        assert terminal.process.poll() is None, "it goes on while the router is away"
        terminal.press(b"x")
        terminal.press(b"q")
        assert terminal.wait() == 0
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.close()


@pytest.mark.process
def test_on_a_terminal_ctrl_c_ends_it() -> None:
    terminal = Terminal("--router", GONE, "--interval", "0.1")
    try:
        terminal.until(lambda seen: b"cannot connect" in seen)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.wait() == 130
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.close()
