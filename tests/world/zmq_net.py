"""The parts of ZMQ that kvatlas and its engines use, in memory, over the links and on the time of a
``VirtualLoop``.

PUB/SUB (prefixes; a subscription takes its way), DEALER/ROUTER, PAIR as monitor. A message waits in its
sender's queue, is on the wire, waits in the receiver's kernel, and in the receiver's queue; each is bounded,
so a slow or cut-off subscriber loses messages at its publisher, as in libzmq. A connecting socket connects
again for ever with libzmq's pauses. With a connection are lost what was on the wire and the queue of the side
that was bound; what a connecting socket has queued is sent after the next connection. Only keepalive options
notice an end that says nothing.

``ZmqNetwork.loses`` may take any published message on its way into a queue.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import re
import struct
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

import zmq

from tests.world.machines import MACHINE, PROCESS

if TYPE_CHECKING:
    from tests.world.loop import VirtualLoop

Message = list[bytes]
WINDOW_BYTES = 512 * 1024
"""Bytes of a connection that have left the sender's queue and are not in the receiver's."""
_DEFAULTS = {
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.MAXMSGSIZE: -1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 0,
    zmq.LINGER: -1,
    zmq.TCP_KEEPALIVE: -1,
    zmq.TCP_KEEPALIVE_IDLE: 7200,
    zmq.TCP_KEEPALIVE_INTVL: 75,
    zmq.TCP_KEEPALIVE_CNT: 9,
}
_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):(\*|[0-9]{1,5})|(?:inproc|ipc)://.+")
_FIRST_NUMBER = 1 << 20
_KERNEL = Context()


def _error(number: int) -> zmq.ZMQError:
    return zmq.ZMQError(number)


class ZmqNetwork:
    """All sockets of a loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.open: dict[ZmqSocket, None] = {}
        self.bound: dict[str, ZmqSocket] = {}
        """By endpoint, with the machine's address as host."""
        self.loses: Callable[[str, str, Message], bool] = lambda publisher, subscriber, message: False
        """Called with both machines and a published message: whether it is lost."""
        self.lost = 0
        """Messages that ``loses`` took."""
        self.dropped = 0
        """Messages beyond a high-water mark."""
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._by_number: dict[int, ZmqSocket] = {}
        self._of_context: dict[int, list[ZmqSocket]] = {}

    def socket(self, kind: int, *, owner: object = None, is_async: bool = False) -> ZmqSocket:
        """A new socket; ``owner``: the ``zmq.Context`` that may close it."""
        made = (AsyncZmqSocket if is_async else ZmqSocket)(self, kind, next(self._numbers))
        self.open[made] = self._by_number[made.number] = made  # type: ignore[assignment]
        self._of_context.setdefault(id(owner), []).append(made)
        return made

    def close_all(self, owner: object) -> None:
        """Close the sockets of a context."""
        for one in self._of_context.pop(id(owner), []):
            one.close(linger=0)

    def forget(self, socket: ZmqSocket) -> None:
        self.open.pop(socket, None)
        self._by_number.pop(socket.number, None)
        for endpoint in socket.endpoints:
            self.bound.pop(endpoint, None)

    def knows(self, number: int) -> bool:
        """Whether a descriptor is one of these sockets'."""
        return number in self._by_number

    def watched(self, number: int) -> None:
        """A reader was added: an arrival before it is signalled now."""
        if self._by_number[number].signalled:
            self.loop.readable(number)

    def killed(self, process: int, *, silent: bool) -> None:
        """The sockets of a killed process are gone (``VirtualLoop.kill``)."""
        for one in [one for one in self.open if one.process == process]:
            one.end(silent=silent)


class _Pipe:
    """One direction of a connection. ``queue`` may be older than the connection."""

    def __init__(self, sender: ZmqSocket, receiver: ZmqSocket, queue: deque[Message]) -> None:
        self.sender, self.receiver, self.queue = sender, receiver, queue
        self.net, self.loop = sender.net, sender.net.loop
        self.back: _Pipe
        """The other direction."""
        self.topics: list[bytes] = []
        """Subscriptions of the receiver, as far as the sender knows."""
        self.sends, self.receives = True, True
        """Whether this end still has the connection."""
        self.name = b""
        """By which a ROUTER that sends knows the receiver."""
        self.held = 0
        """Messages in the receiver's queue."""
        self._wire_bytes = 0
        self._arrived: deque[tuple[Message, int]] = deque()
        self._last_s = 0.0
        self.heard_s = self.loop.now

    def has_room(self) -> bool:
        high = self.sender.options[zmq.SNDHWM]
        return not high or len(self.queue) < high

    def put(self, message: Message) -> bool:
        """Queue a message; False, and counted, if there is no room."""
        if not self.has_room():
            self.net.dropped += 1
            return False
        self.queue.append(message)
        self.pump()
        return True

    def later(self, call: Callable[..., None], *args: Any, size: int = 0) -> None:
        """Call after the way from sender to receiver, in order of these calls."""
        here, there = self.sender.machine, self.receiver.machine
        net = self.loop.net
        delay_s = net.delay(here, there) + size / net.link(here, there).rate
        self._last_s = max(self._last_s + 1e-8, self.loop.now + delay_s)
        self.loop.call_at(self._last_s, call, *args, context=_KERNEL)

    def pump(self) -> None:
        """Send what the link and the window allow."""
        queue = self.queue
        while queue and self.sends and self._wire_bytes < WINDOW_BYTES:
            if not self.loop.net.is_up(self.sender.machine, self.receiver.machine, "zmq"):
                return
            message = queue.popleft()
            size = sum(map(len, message)) + 9 * len(message)
            self._wire_bytes += size
            self.later(self._arrive, message, size, size=size)

    def _arrive(self, message: Message, size: int) -> None:
        if self.receiver.machine in self.loop.net.off:
            return
        self.loop.mark(b"".join(message), self.sender.number, self.receiver.number)
        if not self.receives:  # reset by the kernel
            self.back.later(self.sender.lose, self)
            return
        self.heard_s = self.loop.now
        if 0 <= self.receiver.options[zmq.MAXMSGSIZE] < max(map(len, message), default=0):
            self.receiver.lose(self.back)
            self.back.later(self.sender.lose, self)
            return
        self._arrived.append((message, size))
        self.hand_over()

    def hand_over(self) -> None:
        """Into the receiver's queue, as far as there is room."""
        high = self.receiver.options[zmq.RCVHWM]
        while self._arrived and (not high or self.held < high):
            message, size = self._arrived.popleft()
            self._wire_bytes -= size
            self.held += 1
            self.receiver.take(self, message)
        self.pump()


class _Connecting:
    """One ``connect``: attempts, and the connection if there is one."""

    def __init__(self, socket: ZmqSocket, endpoint: str) -> None:
        self.socket, self.endpoint = socket, endpoint
        self.queue: deque[Message] = deque()
        self.pipe: _Pipe | None = None
        self.open = True
        self._pause_ms = socket.options[zmq.RECONNECT_IVL]
        self.machine = socket.net.loop.net.host(_host(endpoint))
        self._attempt()

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.socket.net.loop.call_later(delay_s, call, context=_KERNEL)

    def _way_s(self) -> float:
        return self.socket.net.loop.net.delay(self.socket.machine, self.machine)

    def again(self) -> None:
        """Connect after libzmq's pause: its interval and up to as much at random, longer each time if so
        set."""
        pause_ms = self._pause_ms
        if longest_ms := self.socket.options[zmq.RECONNECT_IVL_MAX]:
            self._pause_ms = min(2 * pause_ms, longest_ms)
        jitter_ms = self.socket.net.loop.rng.random() * pause_ms
        self._later((pause_ms + jitter_ms) / 1000, self._attempt)

    def _attempt(self) -> None:
        if self.open:
            self.socket.tell(zmq.EVENT_CONNECT_DELAYED, self.endpoint)  # always so over TCP
            self._later(self._way_s(), self._syn)

    def _syn(self) -> None:
        """At the other machine, or where it would be."""
        net = self.socket.net
        other = net.bound.get(self.endpoint)
        if not self.open:
            return
        if other is None or not net.loop.net.is_up(self.socket.machine, self.machine, "zmq"):
            self.socket.tell(zmq.EVENT_CONNECT_RETRIED, self.endpoint)
            self.again()
            return
        out, back = _Pipe(self.socket, other, self.queue), _Pipe(other, self.socket, deque())
        out.back, back.back = back, out
        other.attach(back, accepted=True)
        back.later(self._connected, out)

    def _connected(self, pipe: _Pipe) -> None:
        if not self.open or not pipe.receives:
            pipe.sends = False
            pipe.later(pipe.receiver.lose, pipe.back)
            if self.open:
                self.again()
            return
        self.pipe, self._pause_ms = pipe, self.socket.options[zmq.RECONNECT_IVL]
        self.socket.attach(pipe, accepted=False)
        self.socket.tell(zmq.EVENT_CONNECTED, self.endpoint)
        self.socket.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, self.endpoint)
        self.socket.tell_topics(pipe)
        pipe.pump()

    def lost(self) -> None:
        self.pipe = None
        if self.open:
            self.socket.tell(zmq.EVENT_DISCONNECTED, self.endpoint)
            self.again()


class ZmqSocket:
    """One socket, with the methods of ``zmq.Socket`` that are in use; none of them waits."""

    def __init__(self, net: ZmqNetwork, kind: int, number: int) -> None:
        self.net, self.kind, self.number = net, kind, number
        self.machine, self.process = MACHINE.get(), PROCESS.get()
        self.options: dict[int, Any] = dict(_DEFAULTS)
        self.name = b"\0" + number.to_bytes(4, "big")
        self.closed = False
        self.signalled = False
        """Whether the descriptor is readable: since the last arrival, until it is looked at."""
        self.endpoints: list[str] = []
        self.topics: list[bytes] = []
        self.pipes: dict[_Pipe, None] = {}
        """To each connected socket."""
        self.connecting: dict[str, _Connecting] = {}
        self._inbox: deque[tuple[_Pipe | None, Message]] = deque()
        self._monitor: ZmqSocket | None = None
        self._turn = 0
        self._parts: Message = []

    # Options.

    def fileno(self) -> int:
        return self.number

    FD = property(fileno)

    def set(self, option: int, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else value
        if option == zmq.SUBSCRIBE:
            self.topics.append(data)
            self._topics_changed()
        elif option == zmq.UNSUBSCRIBE:
            self.topics.remove(data)
            self._topics_changed()
        elif option == zmq.ROUTING_ID:
            self.name = data
        else:
            self.options[option] = value

    def setsockopt(self, option: int, value: Any) -> None:
        self.set(option, value)

    def get(self, option: int) -> Any:
        if option == zmq.EVENTS:
            self.signalled = False
            return (zmq.POLLIN if self._inbox else 0) | zmq.POLLOUT
        if option == zmq.LAST_ENDPOINT:
            return (self.endpoints[-1] if self.endpoints else "").encode() + b"\0"
        if option == zmq.FD:
            return self.number
        return self.options[option]

    getsockopt = get

    def getsockopt_string(self, option: int) -> str:
        return str(self.get(option).rstrip(b"\0").decode())

    get_string = getsockopt_string

    def set_hwm(self, value: int) -> None:
        self.options[zmq.SNDHWM] = self.options[zmq.RCVHWM] = value

    hwm = property(None, set_hwm)
    linger = property(None, lambda self, value: self.set(zmq.LINGER, value))

    def setsockopt_string(self, option: int, value: str) -> None:
        self.set(option, value.encode())

    set_string = setsockopt_string

    def subscribe(self, topic: bytes | str) -> None:
        self.set(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, topic: bytes | str) -> None:
        self.set(zmq.UNSUBSCRIBE, topic)

    def _topics_changed(self) -> None:
        for pipe in self.pipes:
            self.tell_topics(pipe)

    def tell_topics(self, pipe: _Pipe) -> None:
        """The other end learns what this subscriber wants."""
        if self.kind == zmq.SUB:
            pipe.later(setattr, pipe.back, "topics", list(self.topics))

    # Addresses.

    def bind(self, endpoint: str) -> None:
        if not _ENDPOINT.fullmatch(endpoint):
            raise _error(errno.EINVAL)
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            machine = self.net.loop.net.host(None if host == "*" else host.strip("[]"))
            if machine != self.machine and not machine.startswith("127."):
                raise _error(errno.EADDRNOTAVAIL)
            number = self.net.loop.net.port(machine) if port in {"*", "0"} else int(port)
            endpoint = f"tcp://{machine}:{number}"
        if endpoint in self.net.bound or (endpoint.startswith("tcp://") and self._is_listened(endpoint)):
            raise _error(errno.EADDRINUSE)
        self.net.bound[endpoint] = self
        self.endpoints.append(endpoint)

    def _is_listened(self, endpoint: str) -> bool:
        machine, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return (machine, int(port)) in self.net.loop.net.listening

    def bind_to_random_port(self, address: str, **_: Any) -> int:
        self.bind(f"{address}:*")
        return int(self.endpoints[-1].rpartition(":")[2])

    def unbind(self, endpoint: str) -> None:
        self.endpoints.remove(endpoint)
        del self.net.bound[endpoint]

    def connect(self, endpoint: str) -> None:
        if not _ENDPOINT.fullmatch(endpoint) or "*" in endpoint:
            raise _error(errno.EINVAL)
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            if not 0 < int(port) < 1 << 16:
                raise _error(errno.EINVAL)
            endpoint = f"tcp://{self.net.loop.net.host(host.strip('[]'))}:{int(port)}"
        if endpoint not in self.connecting:
            self.connecting[endpoint] = _Connecting(self, endpoint)

    def disconnect(self, endpoint: str) -> None:
        if (one := self.connecting.pop(endpoint, None)) is not None:
            one.open = False
            if one.pipe is not None:
                self._hang_up(one.pipe, silent=False)

    # Connections.

    def attach(self, pipe: _Pipe, *, accepted: bool) -> None:
        """A connection is made; ``pipe`` leads to the other end."""
        pipe.name = pipe.receiver.name
        self.pipes[pipe] = None
        if accepted:
            self.tell(zmq.EVENT_ACCEPTED, self.endpoints[-1] if self.endpoints else "")
            self.tell_topics(pipe)
        self._watch(pipe)

    def lose(self, pipe: _Pipe) -> None:
        """This end of a connection is over."""
        pipe.sends = pipe.back.receives = False
        if self.pipes.pop(pipe, pipe) is pipe:
            return
        for one in self.connecting.values():
            if one.pipe is pipe:
                one.lost()
                return
        self.tell(zmq.EVENT_DISCONNECTED, self.endpoints[-1] if self.endpoints else "")

    def _hang_up(self, pipe: _Pipe, *, silent: bool) -> None:
        pipe.sends = pipe.back.receives = False
        self.pipes.pop(pipe, None)
        if not silent and self.net.loop.net.is_up(self.machine, pipe.receiver.machine, "zmq"):
            pipe.later(pipe.receiver.lose, pipe.back)

    def _watch(self, pipe: _Pipe) -> None:
        """Keepalive, and what the kernel sends again when the link is back."""
        net = self.net.loop.net

        def changed() -> None:
            if pipe in self.pipes:
                pipe.pump()
            else:
                net.on_change.remove(changed)

        net.on_change.append(changed)
        if self.options[zmq.TCP_KEEPALIVE] == 1:
            idle_s = self.options[zmq.TCP_KEEPALIVE_IDLE]
            self.net.loop.call_later(idle_s, self._probe, pipe, self.net.loop.now, context=_KERNEL)

    def _probe(self, pipe: _Pipe, heard_s: float) -> None:
        if pipe not in self.pipes:
            return
        option, now = self.options, self.net.loop.now
        heard_s = max(heard_s, pipe.back.heard_s)
        again_s = option[zmq.TCP_KEEPALIVE_INTVL]
        if self.net.loop.net.is_up(self.machine, pipe.receiver.machine, "zmq"):
            if not pipe.receives:
                self.lose(pipe)
                return
            heard_s, again_s = now, option[zmq.TCP_KEEPALIVE_IDLE]
        elif now - heard_s >= option[zmq.TCP_KEEPALIVE_IDLE] + option[zmq.TCP_KEEPALIVE_CNT] * again_s:
            self.lose(pipe)
            return
        self.net.loop.call_later(again_s, self._probe, pipe, heard_s, context=_KERNEL)

    # Monitor.

    def get_monitor_socket(self, events: int | None = None, addr: str | None = None) -> ZmqSocket:
        if self._monitor is None:
            self._monitor = self.net.socket(zmq.PAIR, is_async=isinstance(self, AsyncZmqSocket))
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def tell(self, event: int, endpoint: str) -> None:
        """Tell the monitor."""
        if self._monitor is not None and not self._monitor.closed:
            self._monitor.take(None, [struct.pack("=hi", event, 0), endpoint.encode()])

    # Messages.

    def take(self, pipe: _Pipe | None, message: Message) -> None:
        """A message arrives."""
        if self.kind == zmq.ROUTER and pipe is not None:
            message = [pipe.sender.name, *message]
        self._inbox.append((pipe, message))
        self.signalled = True
        self.net.loop.readable(self.number)

    def send_multipart(self, msg_parts: Any, flags: int = 0, **_: Any) -> None:
        if self.closed:
            raise _error(zmq.ENOTSOCK)
        message = [part.encode() if isinstance(part, str) else bytes(part) for part in msg_parts]
        if self.kind == zmq.PUB:
            for pipe in list(self.pipes):
                if any(map(message[0].startswith, pipe.topics)):
                    if self.net.loses(self.machine, pipe.receiver.machine, message):
                        self.net.lost += 1
                    else:
                        pipe.put(message)
        elif self.kind == zmq.ROUTER:
            for pipe in self.pipes:
                if pipe.name == message[0]:
                    pipe.put(message[1:])
                    break
        else:
            self._send_in_turn(message)

    def _send_in_turn(self, message: Message) -> None:
        """To one of the peers, in turn; what connects has a queue before there is a peer."""
        high = self.options[zmq.SNDHWM]
        queues = [(one.queue, one.pipe) for one in self.connecting.values()]
        queues += [(pipe.queue, pipe) for pipe in self.pipes if all(pipe is not known for _, known in queues)]
        for _ in queues:
            self._turn += 1
            queue, pipe = queues[self._turn % len(queues)]
            if not high or len(queue) < high:
                queue.append(message)
                if pipe is not None:
                    pipe.pump()
                return
        raise zmq.Again

    def send(self, data: Any, flags: int = 0, **_: Any) -> None:
        self._parts.append(bytes(data))
        if not flags & zmq.SNDMORE:
            parts, self._parts = self._parts, []
            self.send_multipart(parts)

    def recv_multipart(self, flags: int = 0, **_: Any) -> Message:
        if self.closed:
            raise _error(zmq.ENOTSOCK)
        self.signalled = False
        if not self._inbox:
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            raise RuntimeError("a blocking receive on virtual time never ends: mark the test real")
        pipe, message = self._inbox.popleft()
        if pipe is not None:
            pipe.held -= 1
            pipe.hand_over()
        return message

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        self.signalled = False
        return (zmq.POLLIN if self._inbox else 0) | (flags & zmq.POLLOUT)

    # The end.

    def close(self, linger: int | None = None) -> None:
        if not self.closed and (self.options[zmq.LINGER] if linger is None else linger):
            for pipe in self.pipes:
                pipe.pump()
        self.end(silent=False)

    def end(self, *, silent: bool) -> None:
        """Close; ``silent``: the power of its machine has failed."""
        if self.closed:
            return
        self.closed = True
        self.net.forget(self)
        for one in self.connecting.values():
            one.open = False
        for pipe in list(self.pipes):
            self._hang_up(pipe, silent=silent)
        if self._monitor is not None:
            self._monitor.close()

    def __enter__(self) -> ZmqSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncZmqSocket(ZmqSocket):
    """As ``zmq.asyncio.Socket``."""

    def __init__(self, net: ZmqNetwork, kind: int, number: int) -> None:
        super().__init__(net, kind, number)
        self._arrived = asyncio.Event()

    def take(self, pipe: _Pipe | None, message: Message) -> None:
        super().take(pipe, message)
        self._arrived.set()

    async def recv_multipart(self, flags: int = 0, **_: Any) -> Message:  # type: ignore[override]
        while True:
            try:
                return super().recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._arrived.clear()
                await self._arrived.wait()

    async def recv(self, flags: int = 0, **_: Any) -> bytes:
        return (await self.recv_multipart())[0]

    async def send_multipart(self, msg_parts: Any, flags: int = 0, **_: Any) -> None:  # type: ignore[override]
        super().send_multipart(msg_parts)

    async def send(self, data: Any, flags: int = 0, **_: Any) -> None:  # type: ignore[override]
        ZmqSocket.send_multipart(self, [data])

    async def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:  # type: ignore[override]
        try:
            async with asyncio.timeout(None if timeout is None or timeout < 0 else timeout / 1000):
                while not (found := super().poll(0, flags)):
                    self._arrived.clear()
                    await self._arrived.wait()
                return found
        except TimeoutError:
            return 0


def _host(endpoint: str) -> str | None:
    if not endpoint.startswith("tcp://"):
        return None
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
