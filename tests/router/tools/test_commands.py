"""The commands as users start them: arguments, statuses, tables, and a running router that is asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.tools.capture import read_capture
from kvatlas.router.tools.explain import ExplainOptions, run_explain
from kvatlas.router.tools.replay import facts_of
from kvatlas.router.tools.replay_player import Player
from tests.support.captures import BLOCK, CAPTURES, tokens
from tests.support.paths import ROOT
from tests.support.waiting import run
from tests.support.whole_router import MODEL, TEXT, configure, routing, running

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": TEXT * 20}]}


def test_replay_from_the_command_line(kvatlas: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    told = kvatlas("replay", str(CAPTURES[0]), "--samples", "2")
    assert told.returncode == 0, told.stderr
    assert "residency over time" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["record", "-o", "x.jsonl"], "no engine"),
        (["record", "--engine", "events=tcp://h:1"], "--output"),
        (["replay"], "give a capture"),
        (["replay", "/nowhere.jsonl"], "/nowhere.jsonl:1: cannot be read: no such file or directory\n"),
        (["replay", str(CAPTURES[0]), "--samples", "0"], "--samples: 0"),
        (["replay", str(CAPTURES[0]), "--source", "nobody"], "no frames of nobody"),
        (["explain", "--request", "/nowhere.json"], "--router"),
        (
            ["explain", "--router", "http://h:1", "--request", "/nowhere.json"],
            "/nowhere.json: cannot be read",
        ),
        (["explain", "--router", "h:1", "--request", "/nowhere.json"], "expected http://HOST:PORT"),
        (
            ["explain", "--router", "http://h:1", "--request", str(ROOT / "README.md")],
            "README.md: not the JSON of a request",
        ),
    ],
)
def test_bad_arguments_end_with_status_2_and_a_reason(
    arguments: list[str], told: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = kvatlas(*arguments)
    assert ended.returncode == 2, ended
    assert told in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_explain_without_a_router_says_what_to_do(
    tmp_path: Path, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(CHAT))
    ended = kvatlas("explain", "--router", "http://127.0.0.1:9", "--request", str(body))
    assert ended.returncode == 2
    assert "connection refused; start the router, or give --router" in ended.stderr


def test_a_running_router_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body, ids = tmp_path / "body.json", tmp_path / "ids.json"
    body.write_text(json.dumps(CHAT))
    ids.write_text(json.dumps({"token_ids": tokens(5 * BLOCK)}))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({**CHAT, "model": "nobody"}))
    agents, same = tmp_path / "agents.json", tmp_path / "same.json"
    agents.write_text(json.dumps({**CHAT, "system": "Be brief.", "max_tokens": 1}))
    system = {"role": "system", "content": "Be brief."}
    same.write_text(json.dumps({**CHAT, "messages": [system, *CHAT["messages"]]}))
    asked: list[tuple[Path, bool, str | None]] = [(body, True, None), (body, False, None), (ids, True, None)]
    asked += [(wrong, True, None), (agents, True, "messages"), (same, True, None)]

    def told(one: tuple[int, str]) -> Any:
        found = json.loads(one[1].splitlines()[-1])
        found["prompt"].pop("api", None)
        return found

    async def scenario() -> list[tuple[int, str]]:
        async with running({}, {}) as engines, routing(configure(*engines)) as rig:
            await rig.ready()
            answer = await rig.chat(TEXT * 20)
            await rig.caught_up(*engines)
            said = []
            for file, as_json, api in asked:
                options = ExplainOptions(file, router=rig.ops_url, api=api)
                capsys.readouterr()  # what the router logged
                status = await asyncio.to_thread(run_explain, options, as_json=as_json)
                out = capsys.readouterr()
                said.append((status, out.out or out.err))
            chosen = json.loads(said[0][1].splitlines()[-1])["choice"]
            assert chosen["engine"] == answer.headers["x-kvatlas-engine"]
            assert chosen["hit_tokens"] > 0
            return said

    said = run(scenario())
    assert [status for status, _ in said] == [0, 0, 0, 1, 0, 0]
    assert "a prompt of 349 tokens" in said[1][1]
    assert json.loads(said[2][1].splitlines()[-1])["prompt"]["tokens"] == 5 * BLOCK
    assert "404" in said[3][1]
    assert told(said[4])["prompt"] == told(said[5])["prompt"]
    assert told(said[4])["prompt"]["tokens"] > 349  # with its system text
    unreachable = ExplainOptions(body, router="http://127.0.0.1:9")
    assert run_explain(unreachable, as_json=True) == 2
    assert "http://127.0.0.1:9/kvatlas/explain: " in capsys.readouterr().err


@pytest.mark.parametrize("levels", [True, False])
async def test_a_target_for_the_first_token_is_asked_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], levels: bool
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(CHAT))
    async with running({}) as engines:
        config = configure(*engines, policy=PolicySettings(service_levels=levels))
        async with routing(config) as rig:
            options = ExplainOptions(body, router=rig.ops_url, slo_ttft_ms=60_000.0)
            capsys.readouterr()
            await asyncio.to_thread(run_explain, options, as_json=False)
    told = capsys.readouterr()
    assert ("target in 60,0" in told.out or "target in 59," in told.out) == levels
    assert ("--slo-ttft-ms was not used" in told.err) == (not levels)


@pytest.mark.real  # a process
def test_a_recording_replays_to_the_engines_contents(tmp_path: Path) -> None:
    """The engine's own pool, its events recorded and played: equal in every group."""
    path = tmp_path / "c.jsonl.gz"

    async def scenario() -> list[set[int]]:
        async with (
            running(
                {
                    "groups": "gemma3-like",
                    "num_blocks": 300,
                    "max_model_len": 768,
                    "max_num_batched_tokens": 256,
                }
            ) as (engine,),
            routing(configure(engine)) as rig,
        ):
            await rig.ready()
            for number in range(12):
                await rig.chat(f"{number % 5} {TEXT * (8 + number % 4)}")
            done = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "kvatlas", "record", "--engine", engine.base_url],
                *["-o", str(path), "--seconds", "2", "--json"],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
            )
            assert await done.wait() == 0
            return [set(engine.pool.resident(group.group_idx)) for group in engine.groups]

    held: list[Any] = run(scenario())
    player = Player(facts_of([path]))
    for frame in read_capture([path]):
        player.play(frame)
    (source,) = [played.source for played in player.runs]
    for plane in player.index.seen_planes(source):
        assert set(player.index.held(source, plane)) == held[plane.group_idx]
    assert any(counts.removed for counts in player.index.counts.values())
