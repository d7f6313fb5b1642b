"""Cost of the endpoint picker: CPU per request of its process, a gateway's messages over a real socket.

    python -m benchmarks.picker

The picker runs in a process of its own, whose CPU is read from the system; this process plays the gateway:
it speaks HTTP/2, sends each request as Envoy does in full duplex (head, body, an empty end, each message in a
frame of its own and with the metadata), waits for the choice and the body that is given back, shows a short
answer, waits for the end of the call, and resets the stream, as Envoy does. *Wire* has a stub in the
router's place that names one fixed engine: HTTP/2, gRPC, the messages, the exchange and the socket. *Whole*
is a whole router before four made-up engines, with chats that were sent before. What is between them is the
router's own work on a request, as in ``serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.h2_codec import FrameReader, encode_literal
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.http.tls import Certificates
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.observe.requests import RequestRecord, RequestTracker
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.carriers import Outbound
from kvatlas.router.proxy.headers import read_request_headers
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.serve import share_the_interpreter, tame_garbage_collection
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.grpc import message_frame
from kvatlas.router.services.epp.header_fields import DESTINATION
from kvatlas.router.services.epp.protobuf import bytes_field, number_field
from kvatlas.router.services.epp.server import PickerServer
from kvatlas.router.services.epp.settings import EppSettings

MODEL = "kvatlas-demo"
ENGINES = [f"http://10.0.0.{number}:8000" for number in range(1, 5)]
_WINDOW = 1 << 30
ANSWER = msgspec.json.encode(
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}
)
_CALL = b"".join(
    encode_literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
        (b":authority", b"picker"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"30000m"),
        (b"content-type", b"application/grpc"),
        (b"x-envoy-internal", b"true"),
        (b"x-forwarded-for", b"127.0.0.1"),
    )
)


# The picker's process.

_BREAKER = Breaker()
_TRACKER = RequestTracker(time.monotonic)


async def stub(engine: str, client: ClientRequest) -> None:
    """In the router's place: reads the request, names one engine, passes the answer on."""
    body, more = b"", True
    while more:
        if (came := await client.read()) is None:
            return
        body, more = body + came[0], came[1]
    said = client.head
    head = read_request_headers(said, b"")
    request = InboundRequest("POST", said.path, b"", said.fields, body, MODEL, False, b"1")
    attempt = Attempt("a", engine, _BREAKER, request, now=time.monotonic)
    record = RequestRecord(_TRACKER, "POST", said.path, attempt.asked_s, attempt.asked_s)
    answer = await client.carrier.ask(attempt, Outbound(client, request, head, b"/", record), 60.0)
    client.start(answer.status, answer.headers, None)
    while data := await answer.read():
        if (waits := client.write(data, more=not answer.finished)) is not None:
            await waits


async def _serve_stub(settings: EppSettings, engines: list[str]) -> None:
    server = PickerServer(
        partial(stub, engines[0]),
        settings,
        proxy=ProxySettings(),
        listen=ListenSettings(),
        certificates=Certificates(),
        clock=time.monotonic,
        readiness=lambda: True,
    )
    async with server.listening():
        tame_garbage_collection()
        print(server.addresses["listen"][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _serve_router(settings: EppSettings, engines: list[str]) -> None:
    config = Config(
        server=ServerConfig(port=0, ops_port=0),
        engines=tuple(EngineAddress(url) for url in engines),
        models={ANY_MODEL: ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR))},
        fleet=FleetSettings(poll_interval_s=3600, poll_down_interval_s=3600, gauge_interval_s=3600),
        epp=settings,
    )
    router = Router(config)
    async with router.running():
        for engine in router.fleet:  # no server there: they are message to be up
            engine.up, engine.models = True, (ModelCard(MODEL),)
        assert router.picker is not None
        tame_garbage_collection()
        print(router.picker.addresses["listen"][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


# The gateway.


class Gateway(asyncio.Protocol):
    """One connection to the picker; ``ask`` is one request until the end of its call."""

    def __init__(self) -> None:
        self._reader = FrameReader(1 << 20)
        self._next_id = 1
        self._waiting: dict[int, tuple[asyncio.Future[None], list[bytes]]] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        ours = {h2.SETTINGS_INITIAL_WINDOW_SIZE: _WINDOW, h2.SETTINGS_MAX_FRAME_SIZE: 16384}
        settings = h2.settings_frame(ours) + h2.window_update_frame(0, _WINDOW)
        self._transport.write(h2.PREFACE + settings)

    def data_received(self, data: bytes) -> None:
        for found in self._reader.feed(data):
            if found.kind == h2.SETTINGS and not found.flags & h2.ACK:
                self._transport.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
            elif found.kind == h2.DATA and (waiting := self._waiting.get(found.stream_id)) is not None:
                if waiting[1] and found.payload.endswith(_GIVEN_BACK):
                    self._transport.write(_data(found.stream_id, waiting[1]))
                    self._waiting[found.stream_id] = waiting[0], []
            elif found.kind == h2.HEADERS and found.flags & h2.END_STREAM:
                future, owed = self._waiting.pop(found.stream_id)
                self._transport.write(h2.rst_stream_frame(found.stream_id, h2.NO_ERROR))
                if owed:
                    future.set_exception(RuntimeError("the picker chose no engine"))
                else:
                    future.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future, _ in self._waiting.values():
            future.cancel("the picker ended the connection")

    def close(self) -> None:
        """No more requests."""
        self._transport.abort()

    async def ask(self, request: list[bytes]) -> None:
        number, self._next_id = self._next_id, self._next_id + 2
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, _SHOWN
        self._transport.write(h2.frame(h2.HEADERS, h2.END_HEADERS, number, _CALL) + _data(number, request))
        await future


_GIVEN_BACK = number_field(2, 1)
"""The end of the last piece of a body."""


def _data(number: int, messages: list[bytes]) -> bytes:
    pieces = [each[at : at + 16384] for each in messages for at in range(0, len(each), 16384)]
    return b"".join(h2.frame(h2.DATA, 0, number, piece) for piece in pieces)


def _message(kind: int, content: bytes, *more: bytes) -> bytes:
    """With the metadata that Envoy always adds."""
    return message_frame(bytes_field(kind, content) + b"".join(more))


def _headers(fields: dict[bytes, bytes]) -> bytes:
    each = b"".join(
        bytes_field(1, bytes_field(1, name) + bytes_field(3, value)) for name, value in fields.items()
    )
    return bytes_field(1, each)


def _struct(key: bytes, value: bytes) -> bytes:
    return bytes_field(1, bytes_field(1, key) + bytes_field(2, value))


_ENDS = number_field(2, 1)
_NO_METADATA = bytes_field(8, b"")
_SERVED = bytes_field(
    8,
    _struct(
        b"envoy.lb",
        b"".join(
            _struct(key.encode(), bytes_field(3, b"10.0.0.1:8000"))
            for key in (f"{DESTINATION}-served", DESTINATION)
        ),
    ),
)
_ANSWER_HEAD = {b":status": b"200", b"content-type": b"application/json", b"server": b"uvicorn"}
_SHOWN = [
    _message(3, _headers(_ANSWER_HEAD), _SERVED),
    _message(5, bytes_field(1, ANSWER), _SERVED),
    _message(5, _ENDS, _SERVED),
]


def request_messages(path: bytes, body: bytes) -> list[bytes]:
    """A request as Envoy shows it."""
    head = {
        b":authority": b"gateway.example",
        b":path": path,
        b":method": b"POST",
        b":scheme": b"http",
        b"user-agent": b"OpenAI/Python 2.8.1",
        b"content-type": b"application/json",
        b"accept": b"application/json",
        b"x-stainless-lang": b"python",
        b"x-stainless-retry-count": b"0",
        b"x-forwarded-proto": b"http",
        b"x-request-id": b"0d9e2c1e-5a3b-4b5e-9f3c-000000000000",
    }
    config = bytes_field(11, number_field(1, m.FULL_DUPLEX) + number_field(2, m.FULL_DUPLEX))
    return [
        _message(2, _headers(head), _NO_METADATA, config),
        _message(4, bytes_field(1, body), _NO_METADATA),
        _message(4, _ENDS, _NO_METADATA),
    ]


def bodies(size: int, *, chat: bool) -> list[bytes]:
    """64 different requests of this many bytes."""
    found = []
    for number in range(64):
        text = f"{number} " + "The quick router reads a long story. " * (size // 37 + 1)
        content: Any = [{"role": "user", "content": ""}] if chat else ""
        fields = {"model": MODEL, ("messages" if chat else "input"): content}
        room = size - len(msgspec.json.encode(fields))
        fields["messages" if chat else "input"] = (
            [{"role": "user", "content": text[:room]}] if chat else text[:room]
        )
        found.append(msgspec.json.encode(fields))
    return found


@contextmanager
def picker(kind: str, engines: Sequence[str] = ENGINES, *, share: float = 1.0) -> Iterator[tuple[int, int]]:
    """Process id and port of a picker; ``share`` of answers are watched."""
    command = [sys.executable, "-m", "benchmarks.picker", "--serve", kind, "--share", str(share)]
    command += ["--engines", *engines]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def cpu_s(pid: int) -> float:
    """User and system time of a process, by its own clock (``clock_getcpuclockid``): to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)


async def measure(
    kind: str, path: bytes, asked: list[bytes], rounds: int, clients: int
) -> tuple[float, float]:
    """Of a call: the picker's CPU in us, the least of three, and the median of its time in ms."""
    requests = [request_messages(path, body) for body in asked]
    with picker(kind) as (pid, port):
        took_s: list[float] = []
        _, gateway = await asyncio.get_running_loop().create_connection(Gateway, "127.0.0.1", port)

        async def client(first: int, count: int) -> None:
            for number in range(count):
                begun = time.perf_counter()
                await gateway.ask(requests[(first + number) % len(requests)])
                took_s.append(time.perf_counter() - begun)

        await asyncio.gather(*(client(each, 64) for each in range(clients)))
        least = float("inf")
        for _ in range(3):
            before = cpu_s(pid)
            await asyncio.gather(*(client(each, rounds // clients) for each in range(clients)))
            least = min(least, (cpu_s(pid) - before) / (rounds // clients * clients))
        gateway.close()
    return least * 1e6, statistics.median(took_s) * 1e3


async def _main(rounds: int, clients: int) -> None:
    print("| | 1 KB: CPU us | 32 KB: CPU us | 1 KB: median ms | 32 KB: median ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, kind, path, chat in (
        ("wire", "stub", b"/v1/embeddings", False),
        ("whole, prompts known", "router", b"/v1/chat/completions", True),
    ):
        sizes = (1024, 32 * 1024)
        figures = [await measure(kind, path, bodies(s, chat=chat), rounds, clients) for s in sizes]
        texts = [*(f"{cpu:.0f}" for cpu, _ in figures), *(f"{ms:.2f}" for _, ms in figures)]
        print(f"| {name} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--serve", choices=("stub", "router"), help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    configure_logging("error", "console")
    if arguments.serve is None:
        uvloop.run(_main(arguments.requests, arguments.clients))
    else:
        share_the_interpreter()
        own = EppSettings(listen="127.0.0.1:0", tls=False, answers_watched_share=arguments.share)
        serve = _serve_stub if arguments.serve == "stub" else _serve_router
        uvloop.run(serve(own, arguments.engines))
