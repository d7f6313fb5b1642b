"""A stream is passed on by its reader, and by its task where the client is slow: the order of what
happens must not matter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.http.client_head import Header
from kvatlas.router.http.upstream import UpstreamConnection
from kvatlas.router.observe.requests import RequestRecord, RequestTracker
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.headers import read_answer_headers
from kvatlas.router.proxy.relay import AnswerRelay
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from tests.support.proxy_rig import DONE, END, SSE_HEAD, chunk, event
from tests.support.transports import FakeTransport
from tests.support.waiting import run


class Client:
    """The part of a ``ClientRequest`` that ``AnswerRelay`` needs; it can be slow."""

    def __init__(self) -> None:
        self.got = b""
        self.whole = False
        self._slow: asyncio.Future[None] | None = None

    def start(self, status: int, fields: list[Header], length: bytes | None) -> None: ...

    def write(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        assert not self.whole
        if self._slow is None:
            self._take(data, more)
            return None
        return self._later(data, more, self._slow)

    async def _later(self, data: bytes, more: bool, caught_up: asyncio.Future[None]) -> None:
        await caught_up
        self._take(data, more)

    def _take(self, data: bytes, more: bool) -> None:
        self.got += data
        self.whole = not more

    def slow(self) -> None:
        self._slow = self._slow or asyncio.get_running_loop().create_future()

    def catch_up(self) -> None:
        if self._slow is not None:
            self._slow.set_result(None)
            self._slow = None


def _connection(stats: ProxyStats) -> UpstreamConnection:
    connection = UpstreamConnection(ProxySettings(), stats, time.monotonic, lambda _: None)
    connection.connection_made(FakeTransport())
    connection.send_request("POST", b"head", b"", 1.0)
    connection.data_received(SSE_HEAD)
    return connection


def _relay(
    connection: UpstreamConnection, client: Client, stats: ProxyStats, silence_s: float = 0.0
) -> AnswerRelay:
    request = InboundRequest("POST", CHAT, b"", [], b"{}", stream=True)
    attempt = Attempt("engine", "http://engine", Breaker(), request, now=time.monotonic)
    record: RequestRecord = RequestTracker(time.monotonic).begin("POST", CHAT)
    head = read_answer_headers(connection.headers, b"", ())
    return AnswerRelay(
        connection, attempt, record, head, cast("Any", client), stats, 1 << 20, _silence_s=silence_s
    )


_STEPS = st.lists(st.sampled_from(["event", "half", "slow", "catch up", "turn"]), max_size=12)


@given(_STEPS, st.sampled_from(["end", "done and loss", "loss", "nonsense"]), st.booleans())
def test_every_whole_line_arrives_in_order_and_every_stream_ends(
    steps: Sequence[str], end: str, slow_at_the_end: bool
) -> None:
    async def main() -> None:
        stats, client = ProxyStats(), Client()
        connection = _connection(stats)
        sent = event("first")
        connection.data_received(chunk(sent))
        task = asyncio.ensure_future(_passed(_relay(connection, client, stats)))
        for number, step in enumerate(steps):
            if step in ("event", "half"):
                data = event(str(number))
                if step == "half":
                    data = data[: len(data) // 2] + b"\n"
                connection.data_received(chunk(data))
                sent += data
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                client.slow() if step == "slow" else client.catch_up()
        if slow_at_the_end:
            client.slow()
        if end in ("end", "done and loss"):
            connection.data_received(chunk(DONE) + END * (end == "end"))
            sent += DONE
        if end == "nonsense":
            connection.data_received(b"nonsense")
        if end != "end":
            connection.connection_lost(None)
        await asyncio.sleep(0)
        client.catch_up()
        await task
        assert client.whole
        assert client.got.startswith(sent)
        broken = end in ("loss", "nonsense")
        assert (b'"error"' in client.got) == broken == bool(stats.streams_broken)
        assert broken or client.got == sent

    run(main())


async def _passed(relay: AnswerRelay) -> None:
    rest = relay.run()
    assert rest is not None
    await rest


@pytest.mark.parametrize(
    "rest",
    [(chunk(DONE), END), (chunk(DONE) + END,), (END,), ()],
    ids=["apart", "at once", "no mark", "closed"],
)
@pytest.mark.parametrize("together", [1, 2, 6])
async def test_tokens_are_counted_once_however_the_pieces_come(together: int, rest: Sequence[bytes]) -> None:
    """Without a usage report they are what is charged."""
    stats, connection = ProxyStats(), _connection(ProxyStats())
    relay = _relay(connection, Client(), stats)
    events = [event(str(number)) for number in range(6)]
    pieces = [b"".join(events[at : at + together]) for at in range(0, 6, together)]
    connection.data_received(chunk(pieces[0]))
    counted: list[int] = []
    relay._attempt.streamed = counted.append  # type: ignore[method-assign, assignment]
    task = asyncio.ensure_future(_passed(relay))
    for piece in (*map(chunk, pieces[1:]), *rest):
        await asyncio.sleep(0)
        connection.data_received(piece)
    await asyncio.sleep(0)
    if not rest:
        connection.connection_lost(None)
    await task
    assert relay._record.streamed_tokens == sum(counted) == 6


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        b'data: {"error":{"message":"no","code":500}}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n',
    ],
    ids=["error", "abort"],
)
async def test_tokens_before_an_engine_gives_up_are_counted_also_in_the_piece_that_says_so(
    ends: bytes, together: bool
) -> None:
    stats, connection = ProxyStats(), _connection(ProxyStats())
    relay, client = _relay(connection, Client(), stats), Client()
    relay._replaceable, relay._answer = True, cast("Any", client)
    connection.data_received(chunk(event("1")))
    task = asyncio.ensure_future(_passed(relay))
    await asyncio.sleep(0)
    last = [event("2") + event("3"), ends]
    for piece in [b"".join(last)] if together else last:
        connection.data_received(chunk(piece))
        await asyncio.sleep(0)
    connection.data_received(END)
    await task
    assert client.got.startswith(event("1") + event("2") + event("3"))
    assert relay._record.streamed_tokens == 3


async def test_a_client_that_does_not_read_gets_no_comments_and_one_that_goes_on_gets_all_events() -> None:
    stats, client = ProxyStats(), Client()
    connection = _connection(stats)
    connection.data_received(chunk(event("first")))
    task = asyncio.ensure_future(_passed(_relay(connection, client, stats, silence_s=2.0)))
    await asyncio.sleep(0)
    client.slow()
    await asyncio.sleep(10.0)  # it has not been written to since: the comment finds that out
    connection.data_received(chunk(event("second")))
    await asyncio.sleep(10.0)
    assert client.got == event("first")
    client.catch_up()
    await asyncio.sleep(3.0)
    connection.data_received(chunk(DONE) + END)
    await task
    assert client.got.replace(b": keep-alive\n\n", b"") == event("first") + event("second") + DONE
    assert b": keep-alive" in client.got


async def test_task_sleeps_while_pieces_come() -> None:
    stats, client = ProxyStats(), Client()
    connection = _connection(stats)
    connection.data_received(chunk(event("first")))
    task = asyncio.ensure_future(_passed(_relay(connection, client, stats)))
    await asyncio.sleep(0)
    for number in range(3):
        connection.data_received(chunk(event(str(number))))
        assert client.got.endswith(event(str(number)))  # in the same turn of the loop
    task.cancel()
    connection.data_received(chunk(event("unasked")))
    await asyncio.wait({task})
    assert task.cancelled()
    assert not client.got.endswith(event("unasked"))
