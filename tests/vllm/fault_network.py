"""A bad network between a publisher and a feed: real sockets, faults drawn from a seed.

Live messages are dropped, doubled, delayed (all behind them wait) and overtaken; requests for replay are
swallowed, answers break off, have holes, come twice or shuffled; connections are cut and come back on the
same addresses. A cut loses what was under way. Once ``calm`` is set everything passes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from tests.support.ports import free_ports

_END_SEQ = b"\xff" * 8
_ANSWER_TIMEOUT_S = 5.0
_BIND_DEADLINE_S = 30.0
LIVE_FATES = ("pass",) * 12 + ("drop", "drop", "twice", "wait", "overtaken")
REPLAY_FATES = ("pass",) * 6 + ("silent", "cut", "hole", "repeated", "shuffled")


class FaultyNetwork:
    """Up from ``up`` to ``down``; ``events`` and ``replay`` are the addresses on the feed's side."""

    def __init__(self, seed: int, events: str, replay: str) -> None:
        self.calm = False
        self.fates: dict[str, int] = {}
        """How often what happened."""
        self._rng = random.Random(seed)
        self._deck: list[str] = []
        """Fates of the next requests for replay: each comes in turn, as there are few of them."""
        self._behind = events, replay
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def up(self) -> None:
        """Connect both sides, if they are not."""
        if self._sockets:
            return
        heard = self._socket(zmq.SUB)
        heard.subscribe(b"")
        heard.connect(self._behind[0])
        live = self._socket(zmq.PUB)
        router = self._socket(zmq.ROUTER)
        await _bind(live, self.events)
        await _bind(router, self.replay)
        self._spawn(self._pass_live(heard, live))
        self._spawn(self._pass_requests(router))

    async def down(self) -> None:
        """Cut every connection; what is under way is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for one in self._sockets:
            one.close(linger=0)
        self._sockets.clear()

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.down()
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set_hwm(100_000)
        self._sockets.append(made)
        return made

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

    def _live_fate(self) -> str:
        return self._noted("pass" if self.calm else self._rng.choice(LIVE_FATES))

    def _replay_fate(self) -> str:
        if not self._deck:
            self._deck = self._rng.sample(REPLAY_FATES, len(REPLAY_FATES))
        return self._noted("pass" if self.calm else self._deck.pop())

    def _noted(self, fate: str) -> str:
        self.fates[fate] = self.fates.get(fate, 0) + 1
        return fate

    async def _pass_live(self, heard: zmq.asyncio.Socket, live: zmq.asyncio.Socket) -> None:
        overtaken: list[list[bytes]] = []
        while True:
            message = await heard.recv_multipart()
            match self._live_fate():
                case "drop":
                    continue
                case "overtaken":
                    overtaken.append(message)
                    continue
                case "wait":
                    await asyncio.sleep(self._rng.uniform(0.0, 0.1))
                case "twice":
                    await live.send_multipart(message)
            await live.send_multipart(message)
            if overtaken and (self.calm or self._rng.random() < 0.3):
                await live.send_multipart(overtaken.pop(self._rng.randrange(len(overtaken))))

    async def _pass_requests(self, router: zmq.asyncio.Socket) -> None:
        while True:
            peer, *request = await router.recv_multipart()
            self._spawn(self._answer(router, peer, request))

    async def _answer(self, router: zmq.asyncio.Socket, peer: bytes, request: list[bytes]) -> None:
        fate, rng = self._replay_fate(), self._rng
        if fate == "silent":
            return
        answer = await self._asked(request)
        if answer is None:
            return
        *batches, end = answer
        match fate:
            case "cut":
                answer = batches[: rng.randint(0, len(batches))]
            case "hole" if batches:
                del answer[rng.randrange(len(batches))]
            case "repeated":
                answer = [message for message in batches for _ in range(2)] + [end]
            case "shuffled":
                rng.shuffle(batches)
                answer = [*batches, end]
        for message in answer:
            await router.send_multipart([peer, *message])

    async def _asked(self, request: list[bytes]) -> list[list[bytes]] | None:
        """The publisher's answer, end marker last; None where it has none, being gone."""
        answer: list[list[bytes]] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set_hwm(100_000)
            dealer.connect(self._behind[1])
            await dealer.send_multipart(request)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    while not answer or answer[-1][-2] != _END_SEQ:
                        answer.append(await dealer.recv_multipart())
            except TimeoutError:
                return None
        return answer


async def _bind(socket: zmq.asyncio.Socket, address: str) -> None:
    """Retried: a port just closed may be taken for a moment."""
    async with asyncio.timeout(_BIND_DEADLINE_S):
        while True:
            try:
                socket.bind(address)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)
            else:
                return
