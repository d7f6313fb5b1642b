"""TCP in memory, on the time of a ``VirtualLoop``: what differs between machines that fail and machines that
do not.

A connection is two ``Transport``s. What one writes waits in its buffer until the other's window has room and
the link is up, is cut into segments as the seed says, and arrives in order after the link's latency. Kernels
are modelled where they decide what a program sees: a window for what the program has not read, a reset for
what arrives at a closed connection, SYNs and segments that are sent again until they time out, keepalive
probes, unread bytes at ``close``.

Faults: ``Network.cut`` (both directions wait), ``power_off`` (nothing of a machine answers, its connections
are half open), ``Link`` (latency, rate), ``Transport.abort``; a killed process: ``VirtualLoop.kill``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from tests.world.machines import MACHINE, PROCESS

if TYPE_CHECKING:
    from tests.world.loop import VirtualLoop

Address = tuple[str, int]
WINDOW_BYTES = 256 * 1024
"""Bytes on the wire and unread at the other end, together: about what Linux gives to a connection at
first."""
SEGMENT_BYTES_MAX = 1 << 16
HIGH_WATER_BYTES = 64 * 1024
"""asyncio's default, above which a transport asks its protocol to pause."""
LOOPBACK_S = (2e-5, 2e-4)
LATENCY_S = (2e-4, 1e-3)
SYN_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Linux with ``tcp_syn_retries`` 6: ETIMEDOUT after 127 s."""
SEND_AGAIN_S = 924.6
"""Linux with ``tcp_retries2`` 15: unacknowledged bytes end a connection after so long."""
_FIRST_PORT = 30_000
_EOF, _RESET = object(), object()
_KERNEL = Context()
"""Work of kernels belongs to no process."""


class Link:
    """One direction between two machines. ``latency_s``: least and most; ``rate``: bytes a second. ``up``
    False: what is sent waits, as TCP sends it again until the link is back."""

    __slots__ = ("latency_s", "rate", "up")

    def __init__(self, latency_s: tuple[float, float]) -> None:
        self.latency_s, self.rate, self.up = latency_s, 1e9, True


class Network:
    """All machines of a loop; they exist as they are named."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.listening: dict[Address, Listener] = {}
        self.transports: dict[Transport, None] = {}
        self.connects = 0
        """Connections that were asked for."""
        self.off: set[str] = set()
        """Machines without power."""
        self.on_change: list[Callable[[], None]] = []
        """Called when a link or a machine is back."""
        self._links: dict[tuple[str, str], Link] = {}
        self._blocked: set[tuple[str, str, str]] = set()
        self._ports: dict[str, int] = {}

    # Links and machines.

    def link(self, a: str, b: str) -> Link:
        """The link from machine ``a`` to machine ``b``."""
        found = self._links.get((a, b))
        if found is None:
            found = self._links[a, b] = Link(LOOPBACK_S if a == b else LATENCY_S)
        return found

    def is_up(self, a: str, b: str, kind: str = "tcp") -> bool:
        """Whether what ``a`` sends reaches ``b``; ``kind``: ``tcp``, or ``zmq`` for sockets of ZMQ."""
        blocked = self._blocked and (kind, a, b) in self._blocked
        return self.link(a, b).up and not blocked and not self.off & {a, b}

    def delay(self, a: str, b: str) -> float:
        """Seconds that one segment takes."""
        return self.loop.rng.uniform(*self.link(a, b).latency_s)

    def cut(self, a: str, b: str, *, up: bool = False, only: str = "") -> None:
        """Cut both directions, or with ``up`` heal them: what waited goes on. ``only`` one kind
        (``is_up``), as a firewall does by port."""
        if only:
            change = self._blocked.discard if up else self._blocked.add
            change((only, a, b))
            change((only, b, a))
        else:
            self.link(a, b).up = self.link(b, a).up = up
        if up:
            self._changed()

    def power_off(self, machine: str) -> None:
        """Nothing of it answers any more. Its processes are to be killed with ``silent``."""
        self.off.add(machine)

    def power_on(self, machine: str) -> None:
        """It answers again: with resets, to who thinks that a connection is still open."""
        self.off.discard(machine)
        self._changed()

    def _changed(self) -> None:
        for transport in list(self.transports):
            transport.pump()
        for call in list(self.on_change):
            call()

    def killed(self, process: int, *, silent: bool) -> None:
        """A process has ended (``VirtualLoop.kill``)."""
        for transport in [one for one in self.transports if one.context.get(PROCESS, 0) == process]:
            transport.vanish(silent=silent)
        for address, listener in list(self.listening.items()):
            if listener.context.get(PROCESS, 0) == process:
                del self.listening[address]
                listener.open = False

    # Addresses.

    def host(self, name: str | None) -> str:
        """The machine that this name means to the running code."""
        if not name or name in {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}:
            return MACHINE.get()
        return name

    def port(self, machine: str) -> int:
        """A free port of a machine."""
        port = self._ports.get(machine, _FIRST_PORT) + 1
        while (machine, port) in self.listening:
            port += 1
        self._ports[machine] = port
        return port

    def listen(self, factory: Callable[[], Any] | None, host: str | None, port: int) -> Listener:
        """Listen on this machine. ``factory`` None: connections wait until the socket is given to
        ``create_server``. Raises ``OSError``."""
        machine = self.host(host)
        if machine != MACHINE.get() and not machine.startswith(("127.", "unix:")):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        address = machine, port or (0 if machine.startswith("unix:") else self.port(machine))
        if address in self.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = self.listening[address] = Listener(self, address, (host or "0.0.0.0", address[1]), factory)
        return listener

    # Connections.

    async def connect(self, factory: Callable[[], Any], there: Address) -> tuple[Transport, Any]:
        """As ``loop.create_connection``. Raises ``OSError``."""
        loop = self.loop
        local = there[0].startswith("unix:")
        machine = MACHINE.get()
        here = machine, 0 if local else self.port(machine)
        far = machine if local else there[0]
        self.connects += 1
        for again_s in SYN_AGAIN_S:
            if self.is_up(machine, far):
                break
            await asyncio.sleep(again_s)
        else:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        await asyncio.sleep(self.delay(machine, far))
        listener = self.listening.get(there)
        await asyncio.sleep(self.delay(far, machine))
        if listener is None or not listener.open:
            if local and not os.path.exists(there[0].removeprefix("unix:")):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {there}")
        protocol = factory()
        mine = Transport(self, here, there, machine, far, copy_context())
        theirs = Transport(self, there, here, far, machine, listener.context.copy())
        mine.peer, theirs.peer = theirs, mine
        loop.call_later(self.delay(machine, far), listener.accept, theirs, context=theirs.context)
        mine.begin(protocol)
        return mine, protocol


class VirtualSocket:
    """Socket interface of a listener or of a connection."""

    family, type, proto = socket.AF_INET, socket.SOCK_STREAM, 0

    def __init__(self, name: Address, peer: Address | None = None) -> None:
        self._name, self._peer = name, peer
        self.options: dict[tuple[int, int], Any] = {}
        self.on_option: Callable[[], None] = lambda: None

    def getsockname(self) -> Address:
        return self._name

    def getpeername(self) -> Address:
        if self._peer is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._peer

    def fileno(self) -> int:
        return 100

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        self.options[level, option] = value
        self.on_option()

    def getsockopt(self, level: int, option: int, *_: Any) -> Any:
        return self.options.get((level, option), 0)

    def setblocking(self, flag: bool) -> None: ...

    def close(self) -> None: ...


class Listener(VirtualSocket):
    """A listening socket, and the ``asyncio.Server`` of it."""

    def __init__(self, net: Network, key: Address, name: Address, factory: Callable[[], Any] | None) -> None:
        super().__init__(name)
        self.net, self.key, self.factory = net, key, factory
        self.context = copy_context()
        self.open = True
        self.sockets = (self,)
        self._served: dict[Transport, None] = {}

    def accept(self, transport: Transport) -> None:
        if not self.open:
            transport.vanish(silent=False)
            return
        if self.factory is None:  # not accepted yet
            self.net.loop.call_later(0.001, self.accept, transport, context=transport.context)
            return
        self._served = {one: None for one in self._served if not one.gone}
        self._served[transport] = None
        transport.begin(self.factory())

    def close(self) -> None:
        if self.open:
            self.open = False
            self.net.listening.pop(self.key, None)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.net.loop

    def is_serving(self) -> bool:
        return self.open

    async def start_serving(self) -> None: ...

    async def serve_forever(self) -> None:
        try:
            await self.net.loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None: ...

    def close_clients(self) -> None:
        for one in self._served:
            one.close()

    def abort_clients(self) -> None:
        for one in self._served:
            one.abort()

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, net: Network, here: Address, there: Address, machine: str, far: str, context: Context
    ) -> None:
        super().__init__()
        self.net, self.loop, self.here, self.there = net, net.loop, here, there
        self.machine, self.far, self.context = machine, far, context
        self.peer: Transport
        self.protocol: Any = None
        self.sock = VirtualSocket(here, there)
        self.sock.on_option = self._watch_keepalive
        self.gone = False
        """Closed, reset or killed: the protocol gets nothing but the loss."""
        self._closing = self._paused = self._told_pause = self._sent_eof = self._is_reset = False
        self._buffer: deque[Any] = deque()  # written, and not on the wire
        self._buffered = self._in_flight = self._unread = 0
        self._inbox: deque[Any] = deque()  # arrived, and not read
        self._last_s, self._heard_s = 0.0, net.loop.now
        self._low, self._high = HIGH_WATER_BYTES // 4, HIGH_WATER_BYTES
        self._stuck: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        net.transports[self] = None

    def begin(self, protocol: Any) -> None:
        """Give the connection to a protocol; in the context of its process."""
        self.protocol = protocol
        protocol.connection_made(self)
        self.loop.call_soon(self._deliver, context=self.context)
        if self.gone:  # reset before it was accepted
            error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self.loop.call_soon(protocol.connection_lost, error, context=self.context)

    # What protocols call.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self.sock, "sockname": self.here, "peername": self.there}.get(name, default)

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        self._low, self._high = high // 4 if low is None else low, high

    def write(self, data: Any) -> None:
        if self._sent_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.gone or self._closing or not data:
            return
        if self._is_reset:
            self._fail(errno.ECONNRESET)
            return
        self._buffer.append(bytes(data))
        self._buffered += len(data)
        self.pump()
        if self._buffered > self._high and not self._told_pause:
            self._told_pause = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if not (self._sent_eof or self._closing):
            self._sent_eof = True
            self._buffer.append(_EOF)
            self.pump()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self.loop.call_soon(self._deliver, context=self.context)

    def close(self) -> None:
        """Send what is buffered, then end; with unread bytes, the kernel resets the connection."""
        if self._closing or self.loop.is_closed():
            return
        if self._unread:
            self.abort()
            return
        self._closing = True
        if not self._sent_eof:
            self._buffer.append(_EOF)
        self.pump()

    def abort(self) -> None:
        if self.gone or self.loop.is_closed():
            return
        self._closing = True
        self._send_reset()
        self._lose(None)

    def vanish(self, *, silent: bool) -> None:
        """Its process is no more; its machine resets the connection, or with ``silent`` says nothing."""
        if not silent:
            self._send_reset()
        self._forget()

    # The end.

    def _send_reset(self) -> None:
        self._buffer.clear()
        self._buffered = 0
        self._buffer.append(_RESET)
        self.pump()

    def _forget(self) -> None:
        self.gone = self._closing = True
        self.net.transports.pop(self, None)
        for timer in (self._stuck, self._keepalive):
            if timer is not None:
                timer.cancel()
        self._stuck = self._keepalive = None

    def _lose(self, error: Exception | None) -> None:
        if not self.gone:
            self._forget()
            if self.protocol is not None:
                self.loop.call_soon(self.protocol.connection_lost, error, context=self.context)

    def _fail(self, number: int) -> None:
        """The kernel ends the connection."""
        self._buffer.clear()
        self._buffered = 0
        self._lose(
            {errno.ECONNRESET: ConnectionResetError, errno.ETIMEDOUT: TimeoutError}[number](
                number, os.strerror(number)
            )
        )

    # The wire.

    def pump(self) -> None:
        """Send what the link and the other end's window allow."""
        net, peer = self.net, self.peer
        buffer = self._buffer
        up = not buffer or net.is_up(self.machine, self.far)
        while buffer and up and self._in_flight + peer._unread < WINDOW_BYTES:
            part = buffer.popleft()
            size = len(part) if isinstance(part, bytes) else 0
            if size > (most := self._segment(size)):
                buffer.appendleft(part[most:])
                part, size = part[:most], most
            self._buffered -= size
            self._in_flight += size
            delay_s = net.delay(self.machine, self.far) + size / net.link(self.machine, self.far).rate
            self._last_s = max(self._last_s + 1e-8, self.loop.now + delay_s)
            self.loop.call_at(self._last_s, peer._arrive, part, size, context=_KERNEL)
        self._watch_stuck(stuck=bool(buffer) and not up)
        if self._closing and not buffer:
            self._lose(None)
        if self._told_pause and self._buffered <= self._low and not self.gone:
            self._told_pause = False
            self.loop.call_soon(self._resume_writing, context=self.context)

    def _segment(self, size: int) -> int:
        """Bytes of the next segment: mostly all, now and then a few, so that every cut is met."""
        if size <= 17:
            return size
        most = self.loop.rng.choice((SEGMENT_BYTES_MAX, SEGMENT_BYTES_MAX, 1448, 17))
        return max(most, size // 40)

    def _resume_writing(self) -> None:
        if not self.gone:
            self.protocol.resume_writing()

    def _watch_stuck(self, *, stuck: bool) -> None:
        if stuck and self._stuck is None and not self.gone:
            limit_ms = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            limit_s = limit_ms / 1000 if limit_ms else SEND_AGAIN_S
            self._stuck = self.loop.call_later(limit_s, self._fail, errno.ETIMEDOUT, context=_KERNEL)
        elif not stuck and self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch_keepalive(self) -> None:
        """SO_KEEPALIVE and the times of its probes, as set on the socket."""
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None
        if self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and not self.gone:
            idle_s = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) or 7200
            self._keepalive = self.loop.call_at(self._heard_s + idle_s, self._probe, idle_s, context=_KERNEL)

    def _probe(self, idle_s: float) -> None:
        option = self.sock.getsockopt
        silent_s = self.loop.now - self._heard_s
        every_s = option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) or 75
        limit_s = idle_s + every_s * (option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) or 9)
        again_s = every_s
        if self.net.is_up(self.machine, self.far):
            if self.peer.gone:
                self._fail(errno.ECONNRESET)
                return
            self._heard_s, again_s = self.loop.now, idle_s
        elif silent_s >= limit_s:
            self._fail(errno.ETIMEDOUT)
            return
        self._keepalive = self.loop.call_later(again_s, self._probe, idle_s, context=_KERNEL)

    def _arrive(self, part: Any, size: int) -> None:
        self.peer._in_flight -= size
        self.loop.mark(part if size else b"", self.there, self.here, size)
        if self.machine in self.net.off:
            return
        self._heard_s = self.loop.now
        if part is _RESET:
            # What came before it can still be read, and a program that does not read learns of it by writing.
            self._buffer.clear()
            self._buffered = 0
            self._is_reset = True
            if self.protocol is None:  # not accepted yet
                self._forget()
        if self.gone:
            if size and not self.peer.gone:  # the kernel of a closed connection resets it
                self._send_reset()
            return
        self._inbox.append(part)
        self._unread += size
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        self.loop.call_soon(self._deliver, context=self.context)

    def _deliver(self) -> None:
        inbox = self._inbox
        while inbox and self.protocol is not None and not (self._paused or self.gone or self._closing):
            part = inbox.popleft()
            if part is _RESET:
                self._fail(errno.ECONNRESET)
                return
            if part is _EOF:
                if not self.protocol.eof_received():
                    self.close()
                continue
            while inbox and isinstance(inbox[0], bytes):
                part += inbox.popleft()
            self._unread -= len(part)
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                self._fill(self.protocol, part)
            else:
                self.protocol.data_received(part)
        if not self.peer.gone:
            self.peer.pump()

    def _fill(self, protocol: asyncio.BufferedProtocol, part: bytes) -> None:
        while part:
            room = protocol.get_buffer(len(part))
            size = min(len(room), len(part))
            room[:size] = part[:size]  # type: ignore[index]
            protocol.buffer_updated(size)
            part = part[size:]
