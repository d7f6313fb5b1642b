from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvatlas.connectors.store.base import StoreUnavailable
from kvatlas.connectors.store.file import FileSettings, FileStore
from tests.support.paths import ROOT
from tests.support.waiting import HANG_S


def store_in(folder: Path, max_bytes: int = 10_000, **others: float) -> FileStore:
    return FileStore(FileSettings(folder, max_bytes, **others), sweeps=False)


def put(store: FileStore, key: bytes, size: int = 1000) -> None:
    assert store.put([(key, memoryview(bytes(size)))], HANG_S) == [True]


def age(store: FileStore, key: bytes, seconds: float) -> None:
    path = store._path(key)
    found = os.stat(path)
    os.utime(path, (found.st_atime, found.st_mtime - seconds))


def there(store: FileStore, keys: range) -> list[int]:
    names = {path.stem for path in store._settings.path.rglob("*.kv")}
    return [i for i in keys if b"%03d" % i in {bytes.fromhex(name) for name in names}]


def test_a_sweep_keeps_the_cap_and_what_was_used_last(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for i in range(15):
        put(store, b"%03d" % i)
        age(store, b"%03d" % i, 1000 - i)
    # Use renews, whether by asking, reading or putting again.
    assert store.exists([b"000"], HANG_S) == [True]
    assert store.get_into([(b"001", memoryview(bytearray(1000)))], HANG_S) == [True]
    put(store, b"002")
    assert store.sweep() == 9000
    assert there(store, range(15)) == [0, 1, 2, *range(9, 15)]
    assert store.counters()["evicted"] == 6
    assert store.sweep() == 9000


def test_under_the_cap_a_sweep_removes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for i in range(10):
        put(store, b"%03d" % i)
    assert store.sweep() == 10_000
    assert there(store, range(10)) == list(range(10))


def test_leftovers_of_a_crash_go_when_they_are_old(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
import kvatlas.connectors.store.file as file
write = os.write
file.os.write = lambda f, data: (write(f, data[:10]), os.kill(os.getpid(), signal.SIGKILL))
store = file.FileStore(file.FileSettings(Path(sys.argv[1]), 10_000), sweeps=False)
store.put([(b"key", memoryview(bytes(1000)))], 30.0)
"""
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    [leftover] = [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]
    store = store_in(tmp_path)
    assert store.exists([b"key"], HANG_S) == [False]
    store.sweep()
    assert leftover.exists()
    os.utime(leftover, (0, 0))
    store.sweep()
    assert not leftover.exists()
    assert store.counters()["leftovers"] == 1


def test_of_two_that_sweep_one_leaves_it_to_the_other(tmp_path: Path) -> None:
    one, other = store_in(tmp_path), store_in(tmp_path)
    inside, go_on = threading.Event(), threading.Event()
    sweep = one._sweep_locked

    def held_up() -> int:
        inside.set()
        assert go_on.wait(HANG_S)
        return sweep()

    one._sweep_locked = held_up  # type: ignore[method-assign]
    thread = threading.Thread(target=one.sweep)
    thread.start()
    assert inside.wait(HANG_S)
    assert other.sweep() is None
    go_on.set()
    thread.join()
    assert other.sweep() == 0


@pytest.mark.process
def test_several_processes_write_and_sweep_one_directory(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kvatlas.connectors.store.file import FileSettings, FileStore
store = FileStore(FileSettings(Path(sys.argv[1]), 50_000), sweeps=False)
me = sys.argv[2].encode()
for i in range(120):
    key = b"%s-%d" % (me if i % 2 else b"all", i)
    assert store.put([(key, memoryview(bytes([i]) * 1000))], 30.0) == [True]
    buffer = bytearray(1000)
    if store.get_into([(key, memoryview(buffer))], 30.0) == [True]:
        assert bytes(buffer) == bytes([i]) * 1000
    if i % 10 == 9:
        store.sweep()
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)], cwd=ROOT) for i in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    left = store_in(tmp_path, 50_000).sweep()
    assert left is not None
    assert left <= 50_000
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]


def test_the_background_sweep_keeps_the_cap(tmp_path: Path) -> None:
    store = FileStore(FileSettings(tmp_path, 10_000, sweep_every_s=3600))
    swept = threading.Event()
    sweep = store._sweep_locked

    def seen() -> int:
        left = sweep()
        if left < 10_000:
            swept.set()
        return left

    store._sweep_locked = seen  # type: ignore[method-assign]
    for i in range(40):
        put(store, b"%03d" % i)
    # A large write wakes the sweeper before its hourly run.
    assert swept.wait(HANG_S)
    store.close()


def test_calls_end_by_their_deadline(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    buffer = memoryview(bytearray(10))
    for call in (
        lambda: store.exists([b"key"], 0.0),
        lambda: store.put([(b"key", buffer)], 0.0),
        lambda: store.get_into([(b"key", buffer)], 0.0),
        lambda: store.remove([b"key"], 0.0),
    ):
        with pytest.raises(StoreUnavailable, match="deadline"):
            call()
    assert store.counters()["timeout"] == 4


def test_a_directory_that_vanished_cannot_be_asked(tmp_path: Path) -> None:
    store = store_in(tmp_path / "blocks")
    put(store, b"key")
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").write_text("")
    for call in (
        lambda: store.exists([b"key"], HANG_S),
        lambda: store.put([(b"key", memoryview(bytes(10)))], HANG_S),
        lambda: store.get_into([(b"key", memoryview(bytearray(10)))], HANG_S),
    ):
        with pytest.raises(StoreUnavailable):
            call()


def test_others_may_not_read_what_prompts_left_behind(tmp_path: Path) -> None:
    store = store_in(tmp_path / "blocks")
    put(store, b"key")
    assert (tmp_path / "blocks").stat().st_mode & 0o077 == 0
    assert Path(store._path(b"key")).stat().st_mode & 0o077 == 0
