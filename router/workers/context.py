"""Sockets and files that a worker process inherits from its parent.

The parent opens every socket once, before the first fork, and keeps it open. If a worker dies, its
replacement takes over the accept queue, the control port and the unread messages of siblings. Invariant: a
worker keeps its own ends and closes all others.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.shared_records import SharedRecords, make_memory

# Slot of the worker that serves the ops port and the admin API for all workers.
LEAD = 0
_BACKLOG = 2048
_BUFFER_BYTES = 1 << 20
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


class WorkerContext(msgspec.Struct, frozen=True, eq=False):
    """Sockets and identity of one worker slot. ``life``: number of processes that had this slot before."""

    slot: int
    count: int
    life: int
    public: list[socket.socket]
    """Bound to the public port with ``SO_REUSEPORT``: the kernel spreads new connections over the workers."""
    ops: socket.socket | None
    """Set for the lead only."""
    admin: socket.socket | None
    """Set for the lead only."""
    control: socket.socket
    """Unix socket that accepts calls from siblings."""
    mesh: dict[int, socket.socket]
    """One end of a ``SOCK_SEQPACKET`` pair for each sibling."""
    folder: Path
    counters_fd: int
    """In-memory file with the counters that the lead last received from every worker."""
    ops_at: str
    """Printable address of the lead's ops port; "" without one."""
    started: Callable[[], None]
    """Notifies the parent that this worker listens."""
    parent: int
    """Descriptor that reaches end of file when the parent exits."""
    memory: mmap.mmap | None = None
    """Memory that all workers share; None: there is none."""

    def shared_records(self, stats: PromptStats) -> SharedRecords | None:
        """Return the records of prompts that all workers share."""
        return None if self.memory is None else SharedRecords(self.memory, self.slot, self.count, stats)

    def control_path(self, slot: int) -> str:
        """Return the address of a worker's control port."""
        return str(self.folder / str(slot))


class PortTakenError(OSError):
    """An address is not available; the message names it."""


class WorkerSockets:
    """All sockets of all workers, held by the parent. ``ops`` and ``admin``: host and port, None for no port;
    ``memory_bytes_max``: of the memory that workers share.

    Raises ``PortTakenError``.
    """

    def __init__(
        self,
        count: int,
        public: tuple[str, int],
        *,
        ops: tuple[str, int] | None = None,
        admin: tuple[str, int] | None = None,
        memory_bytes_max: int = 0,
    ) -> None:
        self.count = count
        self._memory = make_memory(memory_bytes_max)
        self._all: list[socket.socket] = []
        # mode 0700: only its owner can connect
        self.folder = Path(tempfile.mkdtemp(prefix="kvatlas-workers-"))
        try:
            self.public = self._bound(*public, copies=count, key="server.port")
            self._ops = None if ops is None else self._bound(*ops, copies=1, key="server.ops_port")[0][0]
            self._admin = None if admin is None else self._bound(*admin, copies=1, key="admin.port")[0][0]
            self._ops_at = "" if self._ops is None else _place(self._ops, ops)
            self._counters_fd = os.memfd_create("kvatlas-counters")
            self._control = [self._control_of(slot) for slot in range(count)]
            self._mesh = {pair: self._pair() for pair in combinations(range(count), 2)}
        except BaseException:
            self.close()
            raise

    def open_worker(self, slot: int, life: int, started: Callable[[], None], parent: int) -> WorkerContext:
        """Return one worker's context and close all other sockets. Call it in the child, after the fork."""
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
            self._counters_fd,
            self._ops_at,
            started,
            parent,
            self._memory,
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
        """Close all sockets and remove the folder."""
        for sock in self._all:
            sock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bound(self, host: str, port: int, *, copies: int, key: str) -> list[list[socket.socket]]:
        """Return listening sockets for every address of ``host``, ``copies`` of each."""
        found: list[list[socket.socket]] = [[] for _ in range(copies)]
        try:
            infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
                where = (address[0], port, *address[2:])
                # Fail if another program uses this port with SO_REUSEPORT.
                if copies > 1 and port:
                    _listening(family, where, shared=False).close()
                for sockets in found:
                    sock = _listening(family, (address[0], port, *address[2:]), shared=copies > 1)
                    self._all.append(sock)
                    sockets.append(sock)
                    port = port or sock.getsockname()[1]
        except OSError as error:
            raise PortTakenError(f"{key}: cannot listen on {host}:{port}: {describe_error(error)}") from None
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
    """Return the number of cores this process may use, limited by its CPU set and container's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        allowed = min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(1, allowed)
