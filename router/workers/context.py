"""Sockets and files that a worker process inherits from its parent, and how the parent opens them.

Every socket is opened once, by the parent, before the first fork, and stays open there: a worker that dies
leaves its queue of new connections, its control port and what its siblings told it to the one that takes its
place. Always true: a worker keeps the ends that are its own and closes all others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from router.http.sockets import reason_of

# The worker that answers the ops port and the admin API, for all.
LEAD = 0
_BACKLOG = 2048
_BUFFER_BYTES = 1 << 20
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


class WorkerContext(msgspec.Struct, frozen=True, eq=False):
    """One worker's place. ``life`` counts the processes that had it before."""

    slot: int
    count: int
    life: int
    public: list[socket.socket]
    """Bound to the public port with ``SO_REUSEPORT``: the kernel spreads new connections over the workers."""
    ops: socket.socket | None
    """Of the lead only."""
    admin: socket.socket | None
    """Of the lead only."""
    control: socket.socket
    """Where siblings ask this worker, on a Unix socket."""
    mesh: dict[int, socket.socket]
    """To each sibling, a pair of ``SOCK_SEQPACKET``."""
    folder: Path
    ledger: int
    """A file in memory, for what the lead last heard of every worker's counts."""
    ops_at: str
    """Where the lead's ops port is, for people; "" where there is none."""
    started: Callable[[], None]
    """Tells the parent that this worker listens."""
    parent: int
    """A descriptor that ends when the parent does."""

    def control_path(self, slot: int) -> str:
        """The address of a worker's control port."""
        return str(self.folder / str(slot))


class PortTakenError(OSError):
    """An address cannot be had; the message says which."""


class WorkerSockets:
    """All sockets of all workers, in the parent. ``ops`` and ``admin``: host and port, None for no port.

    Raises ``PortTakenError``.
    """

    def __init__(
        self,
        count: int,
        public: tuple[str, int],
        *,
        ops: tuple[str, int] | None = None,
        admin: tuple[str, int] | None = None,
    ) -> None:
        self.count = count
        self._all: list[socket.socket] = []
        self.folder = Path(tempfile.mkdtemp(prefix="kvatlas-workers-"))  # 0700: only its owner may ask
        try:
            self.public = self._bound(*public, copies=count, key="server.port")
            self._ops = None if ops is None else self._bound(*ops, copies=1, key="server.ops_port")[0][0]
            self._admin = None if admin is None else self._bound(*admin, copies=1, key="admin.port")[0][0]
            self._ops_at = "" if self._ops is None else _place(self._ops, ops)
            self._ledger = os.memfd_create("kvatlas-ledger")
            self._control = [self._control_of(slot) for slot in range(count)]
            self._mesh = {pair: self._pair() for pair in combinations(range(count), 2)}
        except BaseException:
            self.close()
            raise

    def open_worker(self, slot: int, life: int, started: Callable[[], None], parent: int) -> WorkerContext:
        """The place of one worker; called in it, after the fork: what belongs to others is closed."""
        lead = slot == LEAD
        mesh = {a + b - slot: ends[a != slot] for (a, b), ends in self._mesh.items() if slot in (a, b)}
        worker = WorkerContext(
            slot,
            self.count,
            life,
            self.public[slot],
            self._ops if lead else None,
            self._admin if lead else None,
            self._control[slot],
            mesh,
            self.folder,
            self._ledger,
            self._ops_at,
            started,
            parent,
        )
        own = {*worker.public, worker.ops, worker.admin, worker.control, *mesh.values()}
        for sock in self._all:
            if sock not in own:
                sock.close()
        return worker

    def stop_listening(self) -> None:
        """Release the public port: it closes when the workers close it."""
        for copies in self.public:
            for sock in copies:
                sock.close()

    def close(self) -> None:
        """Close everything, and remove the folder."""
        for sock in self._all:
            sock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bound(self, host: str, port: int, *, copies: int, key: str) -> list[list[socket.socket]]:
        """Listening sockets of every address of ``host``, ``copies`` of each."""
        found: list[list[socket.socket]] = [[] for _ in range(copies)]
        try:
            infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
                where = (address[0], port, *address[2:])
                if copies > 1 and port:  # not shared with a stranger that also has SO_REUSEPORT
                    _listening(family, where, shared=False).close()
                for sockets in found:
                    sock = _listening(family, (address[0], port, *address[2:]), shared=copies > 1)
                    self._all.append(sock)
                    sockets.append(sock)
                    port = port or sock.getsockname()[1]
        except OSError as error:
            raise PortTakenError(f"{key}: cannot listen on {host}:{port}: {reason_of(error)}") from None
        return found

    def _control_of(self, slot: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._all.append(sock)
        sock.bind(str(self.folder / str(slot)))
        sock.listen(_BACKLOG)
        return sock

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in pair:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._all += pair
        return pair


def _place(sock: socket.socket, asked: tuple[str, int] | None) -> str:
    return f"port {sock.getsockname()[1]} of {asked[0] if asked else ''}"


def _listening(family: int, address: Sequence[object], *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(tuple(address))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores that this process may use: of its CPU set, and of its container's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        allowed = min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(1, allowed)


# Messages between the workers of one machine: one socket to each sibling, every message whole and in order.
#
# Sending never waits. A message that does not fit a sibling's buffer is dropped as a whole and counted.


# Below the least buffer that Linux gives a socket by default (208 KiB).
MESSAGE_BYTES_MAX = 192 << 10
_READ_AT_ONCE = 32


class Mesh:
    """``sockets``: by sibling, not blocking. ``on_message`` is called with (sibling, message) in the loop."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], on_message: Callable[[int, bytes], None]
    ) -> None:
        self._sockets = sockets
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to hear; in the running loop."""
        self._loop = asyncio.get_running_loop()
        for sibling, sock in self._sockets.items():
            self._loop.add_reader(sock, self._read, sibling, sock)

    def close(self) -> None:
        """Hear no more."""
        if self._loop is not None:
            for sock in self._sockets.values():
                self._loop.remove_reader(sock)
            self._loop = None

    def broadcast(self, message: bytes) -> int:
        """Send to every sibling; how many did not get it."""
        missed = 0
        for sock in self._sockets.values():
            try:
                sock.send(message)
            except OSError:  # its buffer is full: it is dead, stopped or far behind
                missed += 1
        return missed

    def _read(self, sibling: int, sock: socket.socket) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                message = sock.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:  # the parent is gone, and so are the siblings
                if self._loop is not None:
                    self._loop.remove_reader(sock)
                return
            self._on_message(sibling, message)
