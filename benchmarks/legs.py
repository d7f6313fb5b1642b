"""Cost of the second request of disaggregated prefill: CPU of the router's process per request.

    python -m benchmarks.legs [--seconds 0.5] [--rounds 20] [--bytes 1024 32768]

Two ``kvatlas serve`` stand before the same two cheap engines, which hold every session's prompt but for its
end (``fake_engine_events``). One knows both, as prefill and decode, and asks both for each request; the other
one knows the decode engine alone, where one sequence runs all the time. They are loaded in turn, round after
round, by connections that always have a request open: chats of 1 KB and 32 KB, with a short answer or a
stream of eight chunks. Each request is of a session drawn at random, which both have read before, and ends as
no request did, as those of ``proxy`` do. Turns are short, so that what else the machine does meets both
alike. One line per load: medians over the rounds, and the share of requests that had two legs. Goal: 100 us
for the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.fake_engine_events import SESSIONS, TAIL_BYTES, session_body
from benchmarks.picker import cpu_s
from benchmarks.streams import HEAD, LAST, TOKEN
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR

CONNECTIONS = 32
EVENTS_PORT = 19101
ROUTER_PORTS = ((19121, 19122), (19123, 19124))
"""Of requests, and of operators."""
CHUNKS = 8
READ_S = 6.0
"""Until every session has been read, and its next turns are, and caches have the memory they will have."""
KEPT = b'"do_remote_decode":true'
HELD = b'"max_tokens":7777'
"""Of the one request that is never answered whole: a sequence that prefills at its engine would hold up."""
PACED, PACED_CHUNKS, PACE_S = b'tokens":100', 100, 0.01
"""Of a stream whose chunks come one by one."""
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(20, 540)), list(range(600, 609))],
    "remote_engine_id": "0a0b0c0d-0000-4000-8000-000000000000",
    "remote_request_id": "chatcmpl-0a0b0c0d-0000-4000-8000-000000000000-0-9522eda8",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
USAGE = {"prompt_tokens": 300, "completion_tokens": 1, "total_tokens": 301}
CARDS = json.dumps({"object": "list", "data": [{"id": "fake-model", "object": "model"}]}).encode()


def _answer(**fields: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": " word"}, "finish_reason": "length"}
    body = json.dumps({"id": "chatcmpl-1", "choices": [choice], "usage": USAGE, **fields}).encode()
    return _whole(body)


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


PREFILLED, ANSWERED = _answer(kv_transfer_params=PARAMS), _answer(kv_transfer_params=None)
STREAMED = HEAD + TOKEN * CHUNKS + LAST
PAGES = {
    b"/v1/models": _whole(CARDS),
    b"/version": _whole(b'{"version":"0.32.0"}'),
    b"/health": _whole(b""),
}
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.lower().split(b"\r\n")
            length = next((int(one[15:]) for one in lines if one.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            if head.startswith(b"GET"):
                writer.write(PAGES.get(head.split(b" ", 2)[1], NOT_FOUND))
            elif HELD in body:
                writer.write(HEAD + TOKEN)
            elif KEPT in body[:200]:
                writer.write(PREFILLED)
            elif PACED in body:
                writer.write(HEAD)
                for _ in range(PACED_CHUNKS):
                    writer.write(TOKEN)
                    await asyncio.sleep(PACE_S)
                writer.write(LAST)
            else:
                writer.write(STREAMED if b'"stream":true' in body else ANSWERED)
    except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # uvloop: a closed transport
        writer.close()


def engine_process(pipe: Connection) -> None:
    """The given number of engines; prints their ports, and ends when the pipe does."""

    async def main() -> None:
        servers = [await asyncio.start_server(_serve, "127.0.0.1", 0) for _ in range(pipe.recv())]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.to_thread(pipe.poll, None)

    uvloop.run(main())


class Router:
    """One ``kvatlas serve``, and its figures."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, ops_port: int) -> None:
        self.process = process
        self.port = port
        self._ops = f"http://127.0.0.1:{ops_port}"

    def ready(self) -> bool:
        """Its engines' events are known. Raises ``RuntimeError`` where it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError("the router did not start")
        try:
            with urllib.request.urlopen(f"{self._ops}/kvatlas/engines", timeout=10) as answer:
                return all(one["up"] and one["feed_state"] == "ready" for one in json.load(answer))
        except OSError:
            return False

    def handoffs(self) -> float:
        """Requests that had two legs; 0 where no engine computes prompts for others."""
        with urllib.request.urlopen(f"{self._ops}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("kvatlas_pd_handoffs_total ")]
        return float(found[0].split()[1]) if found else 0.0


@contextmanager
def engines(
    roles: Sequence[str], events_port: int, layout: str = "gpt-oss-like", sizes: Sequence[int] = (1024, 32768)
) -> Iterator[list[str]]:
    """Cheap engines and their `--engine` arguments, with the role if there is one.

    Events ports are two each, from ``events_port`` on. They hold sessions with bodies of these sizes.
    """
    with ExitStack() as stack:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=engine_process, args=(theirs,), daemon=True
        )
        process.start()
        stack.callback(process.terminate)
        ours.send(len(roles))
        ports = [events_port + 2 * i for i in range(len(roles))]
        words = [sys.executable, "-m", "benchmarks.fake_engine_events", str(DEMO_TOKENIZER_DIR), layout]
        words.append(",".join(map(str, sizes)))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        publisher = subprocess.Popen([*words, *map(str, ports)], **pipes)  # type: ignore[call-overload]
        stack.callback(publisher.communicate)  # its standard input closes
        if not publisher.stdout.readline():
            raise RuntimeError("the event publisher did not start")
        yield [
            f"http://127.0.0.1:{port},events=tcp://127.0.0.1:{at},replay=tcp://127.0.0.1:{at + 1}"
            + (role and f",role={role}")
            for role, port, at in zip(roles, ours.recv(), ports, strict=True)
        ]


@contextmanager
def routers() -> Iterator[tuple[Router, Router]]:
    """Before both engines, and before the decode engine alone."""
    with ExitStack() as stack:
        both = stack.enter_context(engines(("prefill", "decode"), EVENTS_PORT))
        alone = both[1].removesuffix(",role=decode")
        known = zip((both, [alone]), ROUTER_PORTS, strict=True)
        made = [stack.enter_context(running(router_words(told, *at), *at)) for told, at in known]
        yield made[0], made[1]


def router_words(told: Sequence[str], port: int, ops_port: int, config: str = "") -> list[str]:
    """The command of a router that splits whatever it can; ``config``: a file with what its models are."""
    words = [sys.executable, "-m", "kvatlas", "serve"]
    words += ["--config", config] if config else ["--tokenizer", str(DEMO_TOKENIZER_DIR)]
    words += ["--port", str(port), "--ops-port", str(ops_port), "--log-level", "warning"]
    for one in told:
        words += ["--engine", one]
    free = {"pd.min_remote_tokens": 0, "pd.leg_overhead_s": 0, "pd.transfer_s_per_token": 0}
    for name, value in {**free, "pd.decode_delay_weight": 1000, "proxy.idle_timeout_s": 3600}.items():
        words += ["--set", f"{name}={value}"]
    return words


@contextmanager
def running(words: Sequence[str], port: int, ops_port: int, **process: Any) -> Iterator[Router]:
    """The router of this command, once its engines' events are known. ``process``: as for ``Popen``."""
    started = subprocess.Popen(words, **process)
    router = Router(started, port, ops_port)
    try:
        while not router.ready():
            time.sleep(0.2)
        yield router
    finally:
        started.terminate()
        started.wait()


class Load:
    """Chats of one size for one router: each session in turn, and from then on any."""

    def __init__(self, router: Router, size: int, *, stream: bool) -> None:
        self._router = router
        self._requests = requests(size, stream=stream)
        self.sent = 0

    async def send(self, until: Callable[[int], bool]) -> int:
        """Requests, until that is true of how many were answered in this call; how many were."""
        sent = self.sent

        def going() -> bool:
            return not until(self.sent - sent)

        await asyncio.gather(*(self._client(going) for _ in range(CONNECTIONS)))
        return self.sent - sent

    async def us(self, seconds: float) -> float:
        """Microseconds of CPU per request."""
        before_s, until_s = cpu_s(self._router.process.pid), time.monotonic() + seconds
        sent = await self.send(lambda _: time.monotonic() >= until_s)
        return 1e6 * (cpu_s(self._router.process.pid) - before_s) / sent

    async def _client(self, going: Callable[[], bool]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._router.port)
        while going():
            writer.write(next(self._requests))
            await read_answer(reader)
            self.sent += 1
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Read one whole answer. Raises ``RuntimeError`` with its head if it is not 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode())
    length = [one for one in head.lower().split(b"\r\n") if one.startswith(b"content-length:")]
    if length:
        await reader.readexactly(int(length[0][15:]))
    else:
        await reader.readuntil(b"\r\n0\r\n\r\n")


async def hold(port: int) -> asyncio.StreamWriter:
    """The sequence that runs on; it is up to the caller to end it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_post(session_body(0, 256, stream=True, max_tokens=7777, tail="0")))
    await reader.readuntil(b"data: ")
    return writer


def requests(size: int, *, stream: bool, max_tokens: int = 200) -> Iterator[bytes]:
    """The load generator's chats, without end."""
    made = []
    for session in range(SESSIONS):
        whole = _post(session_body(session, size, stream=stream, max_tokens=max_tokens, tail="0"))
        before, _, after = whole.rpartition(b"0" * TAIL_BYTES)
        made.append((before, after))
    rng = random.Random(size)
    for number in itertools.count():
        before, after = made[number] if number < SESSIONS else rng.choice(made)
        yield before + (b"%016x" % rng.getrandbits(64)) * (TAIL_BYTES // 16) + after


def _post(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 32768], choices=[1024, 32768])
    args = parser.parse_args()
    with routers() as (two, one):
        held = [await hold(router.port) for router in (two, one)]
        for size, stream in itertools.product(args.bytes, (False, True)):
            loads = [Load(router, size, stream=stream) for router in (two, one)]
            for each in loads:
                await each.us(READ_S)
            handoffs, sent = two.handoffs(), loads[0].sent
            rounds = [[await each.us(args.seconds) for each in loads] for _ in range(args.rounds)]
            us = [statistics.median(arm) for arm in zip(*rounds, strict=True)]
            more = statistics.median(each[0] - each[1] for each in rounds)
            share = (two.handoffs() - handoffs) / (loads[0].sent - sent)
            line = f"{size // 1024} KB {'stream' if stream else 'answer'}: two legs {us[0]:.0f} us, "
            print(line + f"one {us[1]:.0f} us, more {more:.0f} us; {share:.0%} had two", flush=True)
        for writer in held:
            writer.close()


if __name__ == "__main__":
    uvloop.run(main())
