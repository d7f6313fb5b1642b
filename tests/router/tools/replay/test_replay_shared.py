"""``kvatlas replay --index``: what a reader of the shared index sees is what the replay holds in memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from publisher.events import BlockHash
from router.index.base import Plane
from router.replication.settings import IndexSettings
from router.tools.capture import read_capture
from router.tools.replay import ReplayOptions, facts_of, open_shared_replay, run_replay
from tests.support.captures import BLOCK, CAPTURES, CLEARED, removed, stored, tokens, write
from tests.support.redis_servers import Server, any_program

PROMPT, OTHER = tokens(6 * BLOCK), tokens(4 * BLOCK, seed=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(any_program())
    yield made
    made.close()


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_a_reader_sees_the_committed_captures_as_memory_does(
    path: Path, server: Server, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = kvatlas("replay", str(path), "--index", server.url, "--json")
    assert told.returncode == 0, told.stderr
    replayed = json.loads(told.stdout)
    last = {(p["source"], p["medium"], p["group"]): p["blocks"] for p in replayed["samples"][-1]["planes"]}
    shown = {(p["source"], p["medium"], p["group"]): p["same"] for p in replayed["index"]["planes"]}
    assert shown == last
    assert sum(shown.values()) > 0
    assert replayed["index"]["same"] is True


def test_removals_resets_and_restarts_are_seen(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = write(
        tmp_path / "c.jsonl",
        [
            (0, [stored(OTHER), stored(PROMPT), stored(PROMPT, group=1)]),
            (1, [CLEARED, stored(PROMPT), stored(PROMPT), removed(PROMPT, 5)]),
            (0, [stored(OTHER), stored(PROMPT), removed(PROMPT, 5)]),
        ],
    )
    assert run_replay(ReplayOptions((capture,), index=IndexSettings(url=server.url)), as_json=True) == 0
    planes = json.loads(capsys.readouterr().out)["index"]["planes"]
    assert [(p["group"], p["same"], p["only_a"], p["only_b"]) for p in planes] == [
        (0, 9, [], []),
        (1, 0, [], []),
    ]


async def test_what_only_one_side_holds_is_listed(server: Server) -> None:
    index = IndexSettings(url=server.url)
    frames = list(read_capture([CAPTURES[0]]))
    source = frames[0].source
    async with open_shared_replay(index, facts_of([CAPTURES[0]]), {frame.source for frame in frames}) as play:
        play.player.play_all(frames)
        before = await play.compare()
        assert not any(plane.differs for plane in before)
        plane = Plane(before[0].medium, before[0].group)
        gone = next(iter(play.player.ledger.held(source, plane)))
        behind_the_mirror = play.player.ledger
        behind_the_mirror.store(source, plane, [BlockHash(77)])
        behind_the_mirror.set_copies(source, plane, gone, 0)
        after = await play.compare()
        assert after[0].only_a == [f"{77:016x}"]
        assert after[0].only_b == [f"{gone:016x}"]


def test_a_run_leaves_other_namespaces_alone(tmp_path: Path, server: Server) -> None:
    before = set(server.all_keys())
    capture = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)])])
    for _ in range(2):
        assert run_replay(ReplayOptions((capture,), index=IndexSettings(url=server.url)), as_json=True) == 0
    made = set(server.all_keys()) - before
    assert len({key.split(b":")[0] for key in made}) == 2
    assert all(key.startswith(b"replay-") for key in made)
    assert all(server.command("PTTL", key) > 0 for key in made)


def test_the_url_may_lie_in_a_file(
    tmp_path: Path, server: Server, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    where = tmp_path / "url"
    where.write_text(server.url)
    told = kvatlas("replay", str(CAPTURES[0]), "--index-file", str(where))
    assert told.returncode == 0, told.stderr
    assert "B shared index" in told.stdout


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--index", "redis://router:hunter2@127.0.0.1:1/0"), "password on the command line"),
        (("--index", "redis://127.0.0.1:1/0"), "connection"),
        (("--index", "redis://127.0.0.1:1/0", "--diff-seq", "3"), "--index and --diff"),
    ],
)
def test_what_cannot_be_done_ends_with_status_2(
    more: tuple[str, ...], why: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = kvatlas("replay", str(CAPTURES[0]), *more)
    assert told.returncode == 2
    assert why in told.stderr
    assert "hunter2" not in told.stderr + told.stdout
    assert "Traceback" not in told.stderr
