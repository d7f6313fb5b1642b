"""Sources of workloads: a trace, a capture of a running router, or a generator; one draw per seed.

Seed 0 is a file as recorded. Another seed shifts its arrivals: within their tick if times are rounded, else
by up to ``JITTER_GAPS`` mean gaps, which changes only which requests meet in a queue.

Generators (chats, tenants behind shared system prompts, agents that fan out, private documents, bursts of
questions behind shared prompts) draw new requests with each seed; equal arguments give equal requests.
Lengths are log-normal around published figures of chat services; all of these numbers are defaults defined
here. Sessions start within ``seconds``; their later turns may come after.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.requests import Asked, Request, WorkloadError, by_time, continued, spread
from kvatlas.router.simulation.session_files import is_session, read_sessions
from kvatlas.router.simulation.traces import read
from kvatlas.router.simulation.usage_record import asked_in, is_capture, read_capture

TURN_TOKENS_MAX = 6000
ANSWER_TOKENS_MAX = 1500


@dataclass
class _Draw:
    """One workload under construction; in ``chain``, each id represents ``UNIT_TOKENS`` tokens."""

    rng: random.Random
    asked: list[Asked] = field(default_factory=list)
    ids: int = 0
    sessions: int = 0

    def new_ids(self, count: int) -> list[int]:
        first, self.ids = self.ids, self.ids + count
        return list(range(first, self.ids))

    def turn_tokens(self) -> int:
        return max(1, min(TURN_TOKENS_MAX, int(self.rng.lognormvariate(5.8, 1.0))))

    def answer_tokens(self) -> int:
        return max(1, min(ANSWER_TOKENS_MAX, int(self.rng.lognormvariate(5.3, 0.7))))

    def ask(self, at_s: float, tokens: int, answer: int, chain: list[int]) -> list[int]:
        """Add a prompt that continues ``chain``; returns the chain of its whole units."""
        whole, left = divmod(tokens, UNIT_TOKENS)
        grown = chain[:whole] + self.new_ids(max(0, whole - len(chain)))
        tail = self.new_ids(1) if left else []
        self.asked.append(
            Asked(
                at_s=at_s,
                input_tokens=tokens,
                output_tokens=answer,
                ids=tuple(grown + tail),
                session=self.sessions,
            )
        )
        return grown

    def session(self, at_s: float, system_tokens: int, chain: list[int], *, fan_out: float) -> None:
        """Add the turns of one conversation; with probability ``fan_out`` a turn has 3 to 6 siblings within
        seconds."""
        self.sessions += 1
        tokens = system_tokens
        for _ in range(min(6, 1 + int(self.rng.expovariate(0.6)))):
            tokens += self.turn_tokens()
            answer = self.answer_tokens()
            chain = self.ask(at_s, tokens, answer, chain)
            if self.rng.random() < fan_out:
                late_s = 8.0 if self.rng.random() < 0.5 else 0.0
                for _ in range(self.rng.randint(3, 6)):
                    own = self.rng.randint(200, 1500)
                    reply = max(1, int(self.rng.lognormvariate(4.5, 0.6)))
                    self.ask(at_s + late_s + self.rng.uniform(0.05, 1.0), tokens + own, reply, chain)
            tokens += answer
            at_s += 8.0 + self.rng.expovariate(1 / 35)


def chat(count: int, seconds: float, seed: int) -> list[Asked]:
    """Draw conversations behind one short, shared system prompt."""
    draw = _Draw(random.Random(seed))
    system = draw.new_ids(1)
    while len(draw.asked) < 1.3 * count:
        first = int(draw.rng.lognormvariate(7.5, 1.0))
        start_s = draw.rng.uniform(-0.15 * seconds, seconds)
        draw.session(start_s, UNIT_TOKENS + min(first, 32_000), list(system), fan_out=0.0)
    return _cut(draw.asked, count)


def tenants(
    count: int, seconds: float, seed: int, *, fan_out: float = 0.0, tenants_num: int = 150
) -> list[Asked]:
    """Draw sessions behind system prompts of 2k to 16k tokens; some tenants are much more frequent (Zipf)."""
    draw = _Draw(random.Random(seed))
    low, high = math.log(2048), math.log(16_384)
    systems = [int(math.exp(draw.rng.uniform(low, high))) // UNIT_TOKENS for _ in range(tenants_num)]
    prompts = [draw.new_ids(units) for units in systems]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(tenants_num)]
    draw.rng.shuffle(weights)
    while len(draw.asked) < 1.3 * count:
        start_s = draw.rng.uniform(-0.15 * seconds, seconds)
        tenant = draw.rng.choices(range(tenants_num), weights)[0]
        draw.session(start_s, systems[tenant] * UNIT_TOKENS, list(prompts[tenant]), fan_out=fan_out)
    return _cut(draw.asked, count)


def agents(count: int, seconds: float, seed: int) -> list[Asked]:
    """Draw tenants whose turns fan out into siblings: the same context, then a task of each one's own."""
    return tenants(count, seconds, seed, fan_out=0.35)


DOCUMENTS, DOCUMENT_TOKENS, DOCUMENT_TURNS = 192, 49_152, 6
DOCUMENT_QUESTION_TOKENS = DOCUMENT_ANSWER_TOKENS = 256
# Mean pause between two questions: about a sixth of the documents are then in use at a time.
DOCUMENT_GAP_S = 20.0


def documents(count: int, seconds: float, seed: int) -> list[Asked]:
    """Draw conversations about long documents that share nothing: at most ``DOCUMENTS``, 1,152 requests."""
    # The sizes are those of llm-d's guide to sharing KV caches between engines (p2p-kv-cache-sharing).
    draw = _Draw(random.Random(seed))
    for _ in range(min(DOCUMENTS, -(-count // DOCUMENT_TURNS))):
        draw.sessions += 1
        at_s, tokens = draw.rng.uniform(0, seconds), DOCUMENT_TOKENS
        chain = draw.new_ids(DOCUMENT_TOKENS // UNIT_TOKENS)
        for _ in range(DOCUMENT_TURNS):
            tokens += DOCUMENT_QUESTION_TOKENS
            chain = draw.ask(at_s, tokens, DOCUMENT_ANSWER_TOKENS, chain)
            tokens += DOCUMENT_ANSWER_TOKENS
            at_s += draw.rng.uniform(0.5, 1.5) * DOCUMENT_GAP_S
    return _cut(draw.asked, count)


PAUSED_FIRST_TOKENS, PAUSED_TURN_TOKENS, PAUSED_ANSWER_TOKENS = (4096, 16_384), (200, 1500), 150
FLOOD_EVERY_S, FLOOD_S, FLOOD_TOKENS = 240.0, 120.0, (2048, 10_240)


def pauses(count: int, seconds: float, seed: int) -> list[Asked]:
    """Draw agents that pause between turns, and floods of single prompts in the pauses.

    Half of the requests are turns of agents of 8 to 32 turns, whose tool calls take 2 to 15 s, or one in six
    60 to 240 s. The others come once and share nothing, in the first ``FLOOD_S`` of every ``FLOOD_EVERY_S``.
    """
    draw, turns = _Draw(random.Random(seed)), 0
    uniform = draw.rng.uniform
    while turns < count // 2:
        draw.sessions += 1
        at_s, tokens = uniform(-0.15 * seconds, seconds), int(uniform(*PAUSED_FIRST_TOKENS))
        chain: list[int] = []
        for _ in range(draw.rng.randint(8, 32)):
            if at_s > seconds:
                break
            chain = draw.ask(at_s, tokens, PAUSED_ANSWER_TOKENS, chain)
            turns += at_s >= 0
            tokens += PAUSED_ANSWER_TOKENS + int(uniform(*PAUSED_TURN_TOKENS))
            at_s += uniform(60, 240) if draw.rng.random() < 1 / 6 else uniform(2, 15)
    for _ in range(count - turns):
        draw.sessions += 1
        begin_s = FLOOD_EVERY_S * draw.rng.randrange(max(1, round(seconds / FLOOD_EVERY_S)))
        tokens = int(uniform(*FLOOD_TOKENS))
        draw.ask(begin_s + uniform(0, FLOOD_S), tokens, draw.answer_tokens(), [])
    return _cut(draw.asked, count)


SHARED_PROMPTS, SHARED_TOKENS, SHARED_QUESTION_TOKENS, SHARED_UNIT = 150, 6000, 1200, 16
SHARED_BURST_CV = 2.0


def shared(count: int, seconds: float, seed: int) -> list[Asked]:
    """Draw single questions behind 150 system prompts, in bursts: gamma gaps with a deviation of twice their
    mean."""
    # The sizes are those of llm-d's guide to prefix routing; answers are of about 1,000 tokens.
    rng = random.Random(seed)
    shape = SHARED_BURST_CV**-2
    system, own = SHARED_TOKENS // SHARED_UNIT, SHARED_QUESTION_TOKENS // SHARED_UNIT
    asked, at_s, fresh = [], 0.0, SHARED_PROMPTS * system
    for number in range(count):
        prompt = rng.randrange(SHARED_PROMPTS)
        asked.append(
            Asked(
                at_s=at_s,
                input_tokens=SHARED_TOKENS + SHARED_QUESTION_TOKENS,
                output_tokens=max(1, int(rng.lognormvariate(6.8, 0.45))),
                ids=(*range(prompt * system, (prompt + 1) * system), *range(fresh, fresh + own)),
                session=number,
                unit_tokens=SHARED_UNIT,
            )
        )
        fresh += own
        at_s += rng.gammavariate(shape, seconds / count / shape)
    return asked


def _cut(asked: list[Asked], count: int) -> list[Asked]:
    return sorted((a for a in asked if a.at_s >= 0), key=lambda a: a.at_s)[:count]


# By name: (number of requests, seconds, seed) -> requests.
GENERATORS: dict[str, Callable[[int, float, int], list[Asked]]] = {
    "chat": chat,
    "tenants": tenants,
    "agents": agents,
    "documents": documents,
    "pauses": pauses,
    "shared": shared,
}


COUNT = 4000
SECONDS_PER_REQUEST = 0.3
JITTER_GAPS = 2.0


class WorkloadSource(msgspec.Struct, frozen=True, kw_only=True):
    """The workload to simulate. ``name``: a path, or one of ``GENERATORS``.

    ``requests_max``: maximum number of requests (generators: their number, by default ``COUNT``).
    ``seconds``: duration of a generator's arrivals. ``model``: only requests of that model, if a capture has
    several.
    """

    name: str
    requests_max: int | None = None
    seconds: float | None = None
    model: str | None = None

    def draws(self, seeds: Sequence[int]) -> dict[int, list[Request]]:
        """Return the requests per seed. Raises ``WorkloadError``."""
        if self.name in GENERATORS:
            return {seed: self._generated(seed) for seed in seeds}
        if self.seconds is not None:
            raise WorkloadError(f"--seconds is for {', '.join(GENERATORS)}; a file has its own times")
        asked = self._read()[: self.requests_max]
        return {seed: _jittered(continued(spread(asked, seed=seed)), asked, seed) for seed in seeds}

    def _generated(self, seed: int) -> list[Request]:
        count = COUNT if self.requests_max is None else self.requests_max
        seconds = SECONDS_PER_REQUEST * count if self.seconds is None else self.seconds
        return continued(GENERATORS[self.name](count, seconds, seed))

    def _read(self) -> list[Asked]:
        paths = [Path(self.name)]
        if not paths[0].exists():
            paths = [Path(word.strip()) for word in self.name.split(",")]
        path = paths[0]
        if not path.exists() and not path.suffix:
            made = ", ".join(GENERATORS)
            raise WorkloadError(f"{self.name}: neither a file nor one of {made}")
        if all(map(is_session, paths)) and self.model is None:
            return read_sessions(paths)
        if len(paths) > 1:
            raise WorkloadError(f"{self.name}: only session files (*.json, *.json.gz) can be several")
        if is_capture(path):
            return asked_in(read_capture(path, self.model))
        if self.model is not None:
            raise WorkloadError(f"{path}: requests of this format name no model")
        return read(path)


def _jittered(requests: list[Request], asked: Sequence[Asked], seed: int) -> list[Request]:
    in_ticks = [one.at_s for one in requests] != [one.at_s for one in asked]
    if seed == 0 or in_ticks or len(requests) < 2:
        return requests
    most_s = JITTER_GAPS * (requests[-1].at_s - requests[0].at_s) / len(requests)
    offsets = np.random.default_rng(seed).uniform(0.0, most_s, len(requests)).tolist()
    moved = [
        msgspec.structs.replace(one, at_s=one.at_s + offset)
        for one, offset in zip(requests, offsets, strict=True)
    ]
    return by_time(moved)
