"""A head that came before is not parsed again, and is read as if it were."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.http.downstream import RejectedRequestError, RequestReader
from kvatlas.router.http.known_heads import KnownHeads
from kvatlas.router.http.listener import Capacity
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.http.upstream import KnownAnswers, UpstreamConnection, UpstreamError
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from tests.support.examples import examples
from tests.support.proxy_rig import Engine, answer, read_answer, routing
from tests.support.transports import FakeTransport
from tests.support.waiting import run

NO_LENGTH = b"content-length"


class _Connection:
    """The part of ``DownstreamConnection`` that a reader calls: what it is given, in order."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.heads: list[ClientHead] = []
        self.capacity = Capacity(ListenSettings())
        self.write_paused, self.deadline = None, 0.0

    def on_head(self, head: ClientHead) -> _Connection:
        self.heads.append(head)
        fields = [field for field in head.fields if field[0] != NO_LENGTH]
        by_name = {name: value for name, value in head.by_name.items() if name != NO_LENGTH}
        told = head.method, head.path, head.raw_path, head.query, head.version, head.keep_alive
        self.got.append((told, head.expects_continue, fields, by_name))
        return self

    def on_body_bytes(self, cycle: Any, data: bytes, *, last: bool) -> None:
        self.got.append(data)

    def on_trailer_start(self) -> None:
        self.got.append("trailer")

    def body_came(self, data: bytes) -> None:
        self.got += [data, "end"] if data else ["end"]

    def body_ended(self) -> None:
        self.got.append("end")


def _read(
    reads: list[bytes], known: KnownHeads[ClientHead], listen: ListenSettings | None = None
) -> _Connection:
    connection = _Connection()
    reader = RequestReader(cast("Any", connection), listen or ListenSettings(), ListenStats(), known)
    try:
        for data in reads:
            reader.read(data, 0.0)
    except RejectedRequestError as rejected:
        connection.got.append(rejected.error.code)
    return connection


def _post(body: bytes, *lines: bytes, target: bytes = CHAT.encode()) -> bytes:
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join((b"POST %b HTTP/1.1" % target, b"Host: a", *lines, length, b"", body))


def test_the_third_of_a_kind_is_not_parsed() -> None:
    known = KnownHeads[ClientHead]()
    heads = _read([_post(b"x" * size, b"Accept: */*") for size in (3, 10, 5, 200, 0)], known).heads
    assert [head is heads[2] for head in heads] == [False, False, True, True, True]
    assert NO_LENGTH not in heads[2].by_name, "that of another request"


_LINES = st.sampled_from(
    [
        b"Accept: */*",
        b"content-length: 3",
        b"Content-Length: 3",
        b"Content-Length:3",
        b"Content-Length: 03",
        b"Content-Length: +3",
        b"Content-Length: 3 ",
        b"Content-Length: 3, 3",
        b"CONTENT-LENGTH: 3",
        b"X-Note: Content-Length: 7",
        b"x-content-length: 9",
        b"Transfer-Encoding: chunked",
        b"transfer-encoding: identity",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Connection: Upgrade",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"Host: b",
        b" folded: content-length: 4",
        b"X-Empty:",
        b"x\x00: y",
    ]
)


@settings(max_examples=examples(400))
@given(
    st.lists(_LINES, max_size=4),
    st.lists(st.sampled_from([b"", b"abc", b"abcdefg", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]), max_size=5),
    st.sampled_from([b"POST", b"GET", b"HEAD"]),
    st.sampled_from(
        [CHAT.encode(), CHAT.encode() + b"?a=b", b"/v1/models", b"http://h/v1/completions", b"*"]
    ),
    st.integers(1, 3),
    st.sampled_from([100, 4096, 65536]),
)
def test_known_heads_change_nothing(
    lines: list[bytes], bodies: list[bytes], method: bytes, target: bytes, together: int, limit: int
) -> None:
    """Lengths of every spelling, and bodies that share reads."""
    known, listen = KnownHeads[ClientHead](), ListenSettings(header_bytes_max=limit)
    begin = b"\r\n".join((b"%b %b HTTP/1.1" % (method, target), b"Host: a", *lines))
    messages = [b"%b\r\nContent-Length: %d\r\n\r\n%b" % (begin, len(body), body) for body in bodies]
    messages += [begin + b"\r\n\r\n" + body for body in bodies]
    reads = [b"".join(messages[at : at + together]) for at in range(0, len(messages), together)]
    for _ in range(3):
        assert _read(reads, known, listen).got == _read(reads, KnownHeads(), listen).got
    for one in reads * 3:
        assert _read([one], known, listen).got == _read([one], KnownHeads(), listen).got


def test_heads_that_are_all_different_push_out_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.known_heads._KNOWN_MAX", 4)
    known = KnownHeads[ClientHead]()
    usual = [_post(b"{}", b"Accept: %d" % number) for number in range(4)]
    _read(usual * 3, known)
    _read([_post(b"{}", b"traceparent: %d" % number) for number in range(100)], known)
    assert {head.by_name.get(b"accept") for head in known.by_key.values()} == {b"0", b"1", b"2", b"3"}
    _read([_post(b"{}", b"X-Other: a")] * 3, known)
    assert len(known.by_key) == 4


def test_of_heads_that_came_once_a_bounded_number_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.known_heads._SEEN_MAX", 2)
    known = KnownHeads[ClientHead]()
    assert not any(known.again(key) for key in (b"a", b"b", b"c", b"a"))
    assert known.again(b"c")


async def test_every_request_has_its_own_body_id_and_address() -> None:
    async def script(engine: Engine, call: Any, writer: Any) -> None:
        writer.write(answer(200, call.body))

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        bodies = [b'{"model":"m","n":"%b"}' % (b"x" * size) for size in range(6)]
        for body in bodies:
            writer.write(_post(body, b"Content-Type: application/json"))
            assert (await read_answer(reader)).body == body
        heads = [call.head for call in engine.calls]
        assert [call.body for call in engine.calls] == bodies
        assert len({head["x-request-id"] for head in heads}) == len(bodies)
        assert {head["x-forwarded-for"] for head in heads} == {"127.0.0.1"}
        assert [int(head["content-length"]) for head in heads] == [len(body) for body in bodies]


def test_nothing_follows_a_request_that_ends_its_connection() -> None:
    known = KnownHeads[ClientHead]()
    usual = _post(b"{}")
    _read([usual] * 3, known)
    ended = [_post(b"{}", b"Connection: close"), usual]
    for _ in range(3):
        assert _read(ended, known).got == _read(ended, KnownHeads()).got


_ANSWER_LINES = st.sampled_from(
    [
        b"content-type: application/json",
        b"date: Sun, 29 Nov 2026 13:42:07 GMT",
        b"Date: Sun, 29 Nov 2026 13:42:08 GMT",
        b"DATE: now",
        b"date: a\x00b",
        b"date: a\nb: c",
        b"date:",
        b"Content-Length: 3",
        b"content-length: +3",
        b"x-note: content-length: 7",
        b"transfer-encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"connection: close",
        b"Connection: keep-alive",
        b"x\x00: y",
        b" folded: 1",
    ]
)


def _answers(reads: list[list[bytes]], known: KnownAnswers, *methods: str) -> list[Any]:
    """Status, fields, body and the connection's use afterwards, of one answer after another, to requests with
    these methods in turn."""

    async def main() -> list[Any]:
        got: list[Any] = []
        one = UpstreamConnection(ProxySettings(), ProxyStats(), lambda: 0.0, lambda _: None, known)
        one.connection_made(FakeTransport())
        for pieces, method in zip(reads, cycle(methods), strict=False):
            one.send_request(method, b"", b"", 1.0)
            for data in pieces:
                one.data_received(data)
            fields = sorted(one.headers)
            try:
                body = one.read_nowait()
            except UpstreamError as error:
                body = error.reason.encode()
            got.append((one.status, fields, one.complete, body, one.make_idle()))
            if not got[-1][-1]:
                break
        return got

    return run(main())


@settings(max_examples=examples(400))
@given(
    st.sampled_from(
        [b"200 OK", b"200 Fine", b"204 No Content", b"304 Not Modified", b"100 Continue", b"500 No"]
    ),
    st.lists(_ANSWER_LINES, max_size=3),
    st.lists(st.sampled_from([b"", b"{}", b"abcdef", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]), max_size=4),
    st.sampled_from([("POST",), ("HEAD",), ("POST", "HEAD")]),
    st.integers(0, 200),
    st.booleans(),
)
def test_known_answers_change_nothing(
    status: bytes, lines: list[bytes], bodies: list[bytes], methods: tuple[str, ...], cut: int, surplus: bool
) -> None:
    known = KnownAnswers()
    begin = b"\r\n".join((b"HTTP/1.1 " + status, *lines))
    whole = [b"%b\r\ncontent-length: %d\r\n\r\n%b" % (begin, len(body), body) for body in bodies]
    reads = [[one] for one in whole] + [[one[:cut], one[cut:]] for one in whole]
    reads += [[one + b"x"] for one in whole] if surplus else []
    for _ in range(3):
        assert _answers(reads, known, *methods) == _answers(reads, KnownAnswers(), *methods)


def test_the_third_answer_of_a_kind_is_not_parsed() -> None:
    known = KnownAnswers()
    reads = [[b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)] for size in (2, 0, 9)]
    found = _answers(reads, known, "POST")
    assert [body for _, _, _, body, _ in found] == [b"xx", b"", b"x" * 9]
    assert len(known.by_key) == 1


def test_an_answer_that_ends_its_connection_is_not_known() -> None:
    known, last = KnownAnswers(), b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    for _ in range(4):
        assert [idle for *_, idle in _answers([[last]], known, "POST")] == [False]


def test_an_answer_to_head_teaches_nothing() -> None:
    """It has the length of a body that does not come, behind one that did."""
    known, begin = KnownAnswers(), b"HTTP/1.1 200 OK\r\nx: %d\r\ncontent-length: 2\r\n\r\n"
    for _ in range(3):
        _answers([[begin % 1 + b"{}"], [begin % 2]], known, "POST", "HEAD")
    assert list(known.by_key.values()) == [[(b"x", b"1")]]


def test_the_time_of_an_answer_is_its_own() -> None:
    known = KnownAnswers()
    times = [b"Sun, 29 Nov 2026 13:42:%02d GMT" % second for second in range(5)]
    reads = [[b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: 2\r\n\r\n{}" % one] for one in times]
    told = [dict(fields) for _, fields, *_ in _answers(reads, known, "POST")]
    assert [fields[b"date"] for fields in told] == times
    assert list(known.by_key.values()) == [[]]
    bad = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: 2\r\n\r\n{}"
    for value in (b"a\x00b", b"a\nb: c", b"a\rb"):
        one = [[bad % value]]
        assert _answers(one, known, "POST") == _answers(one, KnownAnswers(), "POST")


@pytest.mark.parametrize("dates", [b"DATE: now", b"date: a\r\nDate: b", b"Date: a;b", b"date: a\r\nDATE: b"])
def test_no_time_of_an_answer_is_lost(dates: bytes) -> None:
    known, one = KnownAnswers(), [[b"HTTP/1.1 200 OK\r\n%b\r\ncontent-length: 2\r\n\r\n{}" % dates]]
    for _ in range(4):
        assert _answers(one, known, "POST") == _answers(one, KnownAnswers(), "POST")


async def test_a_known_request_may_take_longer_than_its_connection_may_be_idle() -> None:
    async def script(engine: Engine, call: Any, writer: Any) -> None:
        await asyncio.sleep(3.0 if len(engine.calls) == 4 else 0.0)
        writer.write(answer(200, b"{}"))

    listen = ListenSettings(keepalive_timeout_s=1.0, drain_s_max=0.5)
    async with Engine(script) as engine, routing(engine.url, listen=listen) as rig:
        reader, writer = await rig.connect()
        for _ in range(4):
            writer.write(_post(b'{"model":"m"}'))
            assert (await read_answer(reader)).status == 200
