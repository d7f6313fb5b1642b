"""Two real vLLM servers share a store: what one computed the other loads.

Nothing that goes wrong with the store changes an answer or ends an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvatlas.connectors.store.frame import FRAME_BYTES

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.shared_servers import complete, engine, forget_gpu, metric, same
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import wait_until as until
from tests.vllm.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (70, 200, 513, 1200)
STORED = 95
"""Blocks of all groups that these prompts and the one that waits for them leave in the store."""


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(tokens)]


@dataclass
class Place:
    """A store outside the servers, and what a test does to it."""

    config: dict[str, Any]
    rewrite: Callable[[Callable[[bytes], bytes]], int]
    """Change every value; returns how many there are."""
    destroy: Callable[[], Any]


def damaged(value: bytes) -> bytes:
    at = len(value) // 3
    return value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :]


def forged(value: bytes) -> bytes:
    """Other bytes in a sound frame: what only a wrong load would show."""
    frame = value[-FRAME_BYTES:]
    key_at = len(value) - FRAME_BYTES + 32
    row = bytes(len(value) - FRAME_BYTES)
    checksum = xxhash.xxh3_64_intdigest(row).to_bytes(8, "little")
    made = row + frame[:48] + checksum + frame[56:]
    assert made[key_at : key_at + 16] == value[key_at : key_at + 16]
    return made


def _file_place(folder: Path) -> Place:
    path = folder / "blocks"

    def rewrite(change: Callable[[bytes], bytes]) -> int:
        files = list(path.rglob("*.kv"))
        for file in files:
            file.write_bytes(change(file.read_bytes()))
        return len(files)

    def destroy() -> None:
        path.rename(folder / "elsewhere")
        path.write_text("not a directory any more")

    return Place({"kind": "file", "path": str(path), "max_bytes": "2GiB"}, rewrite, destroy)


def _redis_place(server: Server) -> Place:
    def rewrite(change: Callable[[bytes], bytes]) -> int:
        keys = server.all_keys()
        for key in keys:
            server.command("SET", key, change(server.command("GET", key)))
        return len(keys)

    return Place({"kind": "redis", "url": server.url}, rewrite, server.kill)


@pytest.fixture(scope="module", params=["file", "redis"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(first server, second server, their store)."""
    folder = tmp_path_factory.mktemp(f"shared-{request.param}")
    model = write_tiny_model(folder / "model")
    server = Server(any_program()) if request.param == "redis" else None
    place = _file_place(folder) if server is None else _redis_place(server)
    first = engine(model, folder, "first", place.config)
    second = engine(model, folder, "second", place.config)
    try:
        first.start()
        second.start()
        first.wait_until_healthy(900)
        second.wait_until_healthy(900)
        yield first, second, place
    finally:
        first.stop()
        second.stop()
        if server is not None:
            server.close()


def _stores_ended(base_url: str) -> None:
    """Stores go on after the answer; every step that follows reports some."""

    def settled() -> bool:
        complete(base_url, prompt(999, 40), max_tokens=2)
        return metric(base_url, "blocks_stored") >= STORED

    until(settled, lambda: f"{metric(base_url, 'blocks_stored')} of {STORED} blocks stored")


def test_metrics_of_two_engines_and_their_store(fleet: Any) -> None:
    """One test, in order: each part builds on the state that the one before left behind."""
    first, second, place = fleet
    cold = {n: complete(first.base_url, prompt(n, n)) for n in LENGTHS}
    assert all(answer["cached"] == 0 for answer in cold.values())
    assert metric(first.base_url, "lookups", result="loaded") == 0
    _stores_ended(first.base_url)

    # The second engine has computed nothing: its first request is loaded.
    for n in LENGTHS:
        loaded = complete(second.base_url, prompt(n, n))
        assert same(loaded, cold[n]), n
        if n > 100:
            assert loaded["cached"] > n // 2
    assert metric(second.base_url, "lookups", result="loaded") >= 3
    assert metric(second.base_url, "bytes", direction="load") > 0
    assert metric(second.base_url, "jobs", direction="load", result="failed") == 0

    # The comparison can fail: values that pass every check, and are wrong, show.
    assert place.rewrite(forged) >= STORED
    forget_gpu(second.base_url)
    assert not any(same(complete(second.base_url, prompt(n, n)), cold[n]) for n in LENGTHS[1:])

    # What was damaged is noticed, computed instead, and stored again.
    place.rewrite(damaged)
    forget_gpu(second.base_url)
    for n in LENGTHS:
        assert same(complete(second.base_url, prompt(n, n)), cold[n]), n
    assert metric(second.base_url, "jobs", direction="load", result="failed") > 0
    assert metric(second.base_url, "store", reason="load_fault_checksum") > 0

    # The store vanishes; engines go on by themselves.
    place.destroy()
    for at in (first, second):
        forget_gpu(at.base_url)
        for n in LENGTHS:
            assert same(complete(at.base_url, prompt(n, n)), cold[n]), n
    fresh = prompt(7, 300)
    assert same(complete(first.base_url, fresh), complete(second.base_url, fresh))
