from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvatlas.connectors.store.base import StoreUnavailable
from kvatlas.connectors.store.open import open_store
from kvatlas.connectors.store.redis import RedisSettings, RedisStore
from kvatlas.connectors.store.redis_link import RedisAddress
from tests.support.pki import make_authority, make_certificate
from tests.support.ports import free_port
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import HANG_S


def store_at(port: int, **others: int) -> RedisStore:
    return RedisStore(RedisSettings(RedisAddress(port=port), **others))


def calls(store: RedisStore, deadline_s: float) -> list[Callable[[], object]]:
    buffer = memoryview(bytearray(1000))
    return [
        lambda: store.exists([b"key"], deadline_s),
        lambda: store.put([(b"key", buffer)], deadline_s),
        lambda: store.get_into([(b"key", buffer)], deadline_s),
        lambda: store.remove([b"key"], deadline_s),
    ]


def test_a_server_that_says_nothing_does_not_hold_a_caller(silent_port: int) -> None:
    store = store_at(silent_port)
    for call in calls(store, 0.2):
        with pytest.raises(StoreUnavailable, match=r"timed out|deadline"):
            call()


def test_a_server_that_drips_is_held_to_one_deadline() -> None:
    """Each byte arrives in time for a limit on single reads; all together do not."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"$1000\r\n")
            while not stop.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    store = store_at(listener.getsockname()[1])
    with pytest.raises(StoreUnavailable):
        store.get_into([(b"key", memoryview(bytearray(1000)))], 0.3)
    stop.set()
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    "reply", [b"*1\r\n", b"what?\r\n", b"$5\r\nabcdefgh\r\n", b"$x\r\n", b":1:1\r\n", b""], ids=repr
)
def test_an_unreadable_answer_ends_the_connection_only(reply: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    store = store_at(listener.getsockname()[1], connections=1)
    with pytest.raises(StoreUnavailable):
        store.get_into([(b"key", memoryview(bytearray(5)))], HANG_S)
    thread.join()
    listener.close()
    with pytest.raises(StoreUnavailable, match="refused"):
        store.exists([b"key"], HANG_S)


def test_it_comes_back_with_the_server() -> None:
    server = Server(any_program())
    try:
        store = store_at(server.port)
        assert store.put([(b"key", memoryview(b"value"))], HANG_S) == [True]
        server.kill()
        for call in calls(store, HANG_S):
            with pytest.raises(StoreUnavailable):
                call()
        server.start()
        assert store.exists([b"key"], HANG_S) == [False]
        assert store.put([(b"key", memoryview(b"value"))], HANG_S) == [True]
        store.close()
    finally:
        server.close()


def test_a_frozen_server_does_not_hold_a_caller() -> None:
    server = Server(any_program())
    try:
        store = store_at(server.port)
        assert store.exists([b"key"], HANG_S) == [False]
        server.freeze()
        for call in calls(store, 0.2):
            with pytest.raises(StoreUnavailable):
                call()
        server.thaw()
        assert store.put([(b"key", memoryview(b"value"))], HANG_S) == [True]
        store.close()
    finally:
        server.thaw()
        server.close()


def test_more_threads_than_connections_take_turns(any_server: Server) -> None:
    store = store_at(any_server.port, connections=2)

    def work(at: int) -> bool:
        key, buffer = b"turn-%d" % at, memoryview(bytearray(50_000))
        value = memoryview(os.urandom(50_000))
        store.put([(key, value)], HANG_S)
        return store.get_into([(key, buffer)], HANG_S) == [True] and buffer == value

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    assert store.counters()["connected"] <= 2
    store.close()


def test_without_a_free_connection_the_deadline_counts(silent_port: int) -> None:
    store = store_at(silent_port, connections=1)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.exists, [b"key"], 0.3) for _ in range(3)]
        for done in waiting:
            with pytest.raises(StoreUnavailable):
                done.result()


def test_a_full_server_refuses_and_serves_on() -> None:
    server = Server(any_program(), "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        store = store_at(server.port)
        value = memoryview(bytes(1_000_000))
        done = store.put([(b"%d" % i, value) for i in range(8)], HANG_S)
        assert False in done
        assert store.counters()["full"] == done.count(False)
        held = [i for i, ok in enumerate(done) if ok]
        assert all(store.exists([b"%d" % i for i in held], HANG_S))
        store.close()
    finally:
        server.close()


def test_unused_values_are_evicted_where_configured(any_server: Server) -> None:
    store = store_at(any_server.port, ttl_s=1000)
    store.put([(b"key", memoryview(b"value"))], HANG_S)
    assert 0 < any_server.command("TTL", b"kvatlas:key") <= 1000
    store.close()


def test_password_from_a_file_and_never_in_an_error(tmp_path: Path) -> None:
    server = Server(any_program(), "--requirepass", "s3cret-word")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret-word\n")
    wrong.write_text("wr0ng-word\n")
    try:
        store = RedisStore(RedisSettings(RedisAddress(port=server.port, password_file=right, db=2)))
        assert store.put([(b"key", memoryview(b"value"))], HANG_S) == [True]
        assert store.exists([b"key"], HANG_S) == [True]
        store.close()
        bad = RedisStore(RedisSettings(RedisAddress(port=server.port, password_file=wrong)))
        with pytest.raises(StoreUnavailable, match="refused AUTH") as refusal:
            bad.exists([b"key"], HANG_S)
        assert "w0rd" not in str(refusal.value)
        assert "wr0ng" not in str(refusal.value)
        none = store_at(server.port)
        assert none.exists([b"key"], HANG_S) == [False]
        assert none.counters()["refused"] == 1
        none.close()
    finally:
        server.close()


def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    server = Server(any_program(), "--unixsocket", path)
    try:
        store = RedisStore(RedisSettings(RedisAddress(unix_path=path)))
        value = os.urandom(200_000)
        assert store.put([(b"key", memoryview(value))], HANG_S) == [True]
        buffer = bytearray(200_000)
        assert store.get_into([(b"key", memoryview(buffer))], HANG_S) == [True]
        assert bytes(buffer) == value
        store.close()
    finally:
        server.close()


def test_over_tls_with_a_certificate_and_only_to_the_given_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_authority(tmp_path)
    make_authority(tmp_path, "other")
    make_certificate(tmp_path, "both")
    cert, key, ca, other = (
        str(tmp_path / f"{name}") for name in ("both.crt", "both.key", "ca.crt", "other.crt")
    )
    port = free_port()
    options = ["--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca]
    try:
        server = Server(any_program(), *map(str, options))
    except AssertionError:
        pytest.skip("this server is built without TLS")
    given = {"kind": "redis", "url": f"rediss://127.0.0.1:{port}/0", "cert_file": cert, "key_file": key}
    try:
        store = open_store(given | {"ca_file": ca})
        value = os.urandom(300_000)
        assert store.put([(b"key", memoryview(value))], HANG_S) == [True]
        buffer = bytearray(300_000)
        assert store.get_into([(b"key", memoryview(buffer))], HANG_S) == [True]
        assert bytes(buffer) == value
        store.close()
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            open_store(given).exists([b"key"], HANG_S)
        monkeypatch.setenv("SSL_CERT_FILE", ca)  # what the system trusts
        assert open_store(given).exists([b"key"], HANG_S) == [True]
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            open_store(given | {"ca_file": other}).exists([b"key"], HANG_S)
    finally:
        server.close()
