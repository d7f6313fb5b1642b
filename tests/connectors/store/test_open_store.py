from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.store.base import StoreUnavailable
from kvatlas.connectors.store.open import Circuit, GuardedStore, open_store
from tests.connectors.store.store_kit import MemoryStore


def test_a_file_store_by_its_settings(tmp_path: Path) -> None:
    store = open_store(
        {"kind": "file", "path": str(tmp_path / "blocks"), "max_bytes": "1MiB", "name": "fast"}
    )
    assert store.name == "fast"
    value = memoryview(b"value")
    assert store.put([(b"key", value)], 5.0) == [True]
    other = open_store({"kind": "file", "path": str(tmp_path / "blocks")}, lookup_only=True)
    assert other.exists([b"key", b"another"], 5.0) == [True, False]
    store.close()
    other.close()


@pytest.mark.parametrize(
    ("config", "key", "remedy"),
    [
        (None, "store", "mapping"),
        ("file", "store", "mapping"),
        ({}, "store.kind", "given"),
        ({"kind": "ftp"}, "store.kind", "file, mooncake, redis"),
        ({"kind": "file"}, "store.path", "given"),
        ({"kind": "file", "path": "relative"}, "store.path", "absolute"),
        ({"kind": "file", "path": "/x", "max_bytes": 0}, "store.max_bytes", "positive"),
        ({"kind": "file", "path": "/x", "sweep_every_s": "soon"}, "store.sweep_every_s", "number"),
        ({"kind": "file", "path": "/x", "urll": "?"}, "store.urll", "no such setting"),
        ({"kind": "redis"}, "store.url", "given"),
        ({"kind": "redis", "url": "http://host"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://host:port"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://host/zero"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "unix://"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://h", "connections": 0}, "store.connections", "from 1"),
        ({"kind": "redis", "url": "redis://h", "connections": 2.5}, "store.connections", "whole"),
        ({"kind": "redis", "url": "redis://h", "password": "x"}, "store.password", "password_file"),
        ({"kind": "redis", "url": "redis://h", "password_file": "/none"}, "store.password_file", "read"),
        ({"kind": "redis", "url": "rediss://h", "ca_file": __file__}, "store.ca_file", "PEM"),
        ({"kind": "mooncake"}, "store.master", "given"),
        ({"kind": "mooncake", "master": "h:1", "protocol": "udp"}, "store.protocol", "tcp, rdma"),
    ],
)
def test_impossible_settings_are_refused_by_name(config: Any, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_store(config)
    assert refusal.value.key == key
    assert remedy in str(refusal.value)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password_file") as refusal:
        open_store({"kind": "redis", "url": "redis://me:secret@host/0"})
    assert "secret" not in str(refusal.value)


def test_a_directory_that_cannot_be_made_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file/blocks"):
        open_store({"kind": "file", "path": str(tmp_path / "file" / "blocks")})


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed here")
def test_without_mooncake_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        open_store({"kind": "mooncake", "master": "127.0.0.1:1"})


def test_opening_one_kind_imports_no_other(tmp_path: Path) -> None:
    before = {name for name in sys.modules if name.startswith("kvatlas.connectors.store.")}
    for name in ("kvatlas.connectors.store.redis", "kvatlas.connectors.store.mooncake"):
        before.discard(name)
        sys.modules.pop(name, None)
    open_store({"kind": "file", "path": str(tmp_path / "blocks")}).close()
    assert "kvatlas.connectors.store.redis" not in sys.modules
    assert "kvatlas.connectors.store.mooncake" not in sys.modules


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreUnavailable:
        return True
    return False


def test_an_absent_store_is_asked_now_and_then_only(clock: Clock) -> None:
    store = MemoryStore()
    store.gone = True
    guarded = GuardedStore(store, Circuit("memory", clock=clock))
    for _ in range(1000):
        assert refused(lambda: guarded.exists([b"k"], 1.0))
        clock.now += 0.01
    # Ten seconds: three failures, then pauses of 0.1 s to 10 s that double.
    assert 5 <= len(store.calls) <= 15
    assert guarded.counters()["left_alone"] == 1000 - len(store.calls)
    store.gone = False
    clock.now += 20
    assert guarded.exists([b"k"], 1.0) == [False]
    store.gone = True
    # Whole again: it takes three new failures to leave it alone.
    before = len(store.calls)
    assert all(refused(lambda: guarded.exists([b"k"], 1.0)) for _ in range(9))
    assert len(store.calls) == before + 3


def test_one_caller_at_a_time_tries_a_store_that_was_away(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock)
    for _ in range(3):
        circuit.failed(StoreUnavailable("gone"))
    assert refused(circuit.enter)
    clock.now += 10
    circuit.enter()
    assert refused(circuit.enter)
    circuit.succeeded()
    circuit.enter()
    circuit.enter()


def test_failures_between_successes_do_not_add_up(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock)
    for _ in range(20):
        circuit.enter()
        circuit.failed(StoreUnavailable("gone"))
        circuit.enter()
        circuit.succeeded()


def test_pauses_stay_bounded_however_long_the_store_is_away(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock, longest_pause_s=5.0)
    for _ in range(5000):
        circuit.failed(StoreUnavailable("gone"))
    clock.now += 5.0
    circuit.enter()


def test_whatever_a_store_raises_is_that_it_cannot_be_asked() -> None:
    class Broken(MemoryStore):
        def exists(self, keys: object, deadline_s: float) -> list[bool]:
            raise KeyError("a bug")

    with pytest.raises(StoreUnavailable, match="KeyError"):
        GuardedStore(Broken()).exists([b"k"], 1.0)
