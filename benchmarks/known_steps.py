"""Predicted times to first token against engines whose steps last a known time, in virtual time.

    python -m benchmarks.known_steps [--seeds 3] [--laws default fast ...] [--states light ...] [--exact]

Engines schedule as vLLM does: each step gives running requests their next tokens within a budget, then admits
waiting ones in chunks. A step lasts what its ``Law`` says, so what is measured is the router's model and not
the machine: the load accounts, the learned rates, the choice and the prediction are the router's own. One row
per law and state, the share of predictions within 10 % and 25 % of the measured time, over all seeds. A run
is exact for its seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvatlas.router.placement.candidate import Candidate, Hit, PolicySettings
from kvatlas.router.placement.cost import Choice, ScoredCandidates, choose
from kvatlas.router.placement.first_token import FirstTokenErrors
from kvatlas.router.placement.load import LoadAccount, Ticket
from kvatlas.router.placement.others import NO_OTHERS
from kvatlas.router.placement.rates import FleetRates
from kvatlas.router.placement.service_level import level_met
from kvatlas.router.placement.wait_limit import late_first_token

GAUGES_S = 1.0
POLICY = PolicySettings()


class Law(NamedTuple):
    """Seconds of a step: ``fixed_s``, ``token_s`` per token that it computes (generated ones too), and
    ``context_s`` per pair of such a token and one before it. ``budget``: tokens of a step at most; ``ahead``:
    a step is scheduled when the one before it begins, as vLLM does on accelerators (asynchronous
    scheduling)."""

    fixed_s: float
    token_s: float
    context_s: float = 0.0
    budget: int = 2048
    seqs: int = 256
    ahead: bool = False


LAWS = {
    "default": Law(0.010, 0.0007),
    "ahead": Law(0.010, 0.0007, ahead=True),
    "small steps": Law(0.010, 0.0007, budget=512),
    "fast": Law(0.001, 0.00002, budget=8192),
    "slow start": Law(0.050, 0.0001, budget=8192),
    "attention": Law(0.005, 0.00005, context_s=0.00005 / 50_000, budget=8192),
}
PROBE_TOKENS = 600
COLD = 14
"""Times that the first request takes of its usual ones, as by vLLM 0.32 on a CPU (decision 046)."""
BLOCK_TOKENS = 16
"""Cached tokens are whole blocks."""


class Asked(msgspec.Struct, eq=False):
    """One request on its engine; tokens. ``scheduled`` and ``given`` are those of its answer."""

    prompt: int
    cached: int
    answer: int
    computed: int = 0
    scheduled: int = 0
    given: int = 0
    engine: int = 0
    at_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    number: int = 0
    ticket: Ticket | None = None
    done: Callable[[], None] | None = None


class Step(NamedTuple):
    """Its seconds, and the requests that it gives a token; without any token to compute it takes no time."""

    seconds: float
    gives: list[Asked]


class KnownEngine:
    """Continuous batching in the order of arrival; the rig tells the time."""

    exact = False
    """Whether its twin predicts, and not the router's model."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.works = False
        self.left_s = 0.0
        """Of the running step, when ``alone_s`` is asked."""
        self._steps: deque[Step] = deque()
        self._stepping = False

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self.running), len(self.waiting)

    def add(self, asked: Asked) -> None:
        """Let it wait for a step."""
        asked.computed = asked.cached
        self.waiting.append(asked)

    def begin_step(self) -> float:
        """Begin a step; its seconds."""
        while len(self._steps) <= self.law.ahead:
            self._steps.append(self._schedule())
        self._stepping = True
        return self._steps[0].seconds

    def end_step(self) -> list[Asked]:
        """The requests with a new token."""
        self._stepping = False
        gives = self._steps.popleft().gives
        for one in gives:
            one.given += 1
        self._update(gives)
        return gives

    def alone_s(self, asked: Asked) -> float:
        """Seconds to the first token if this request came now and none after it."""
        twin, copies = KnownEngine(self.law), {id(one): _copy(one) for one in self.running}
        twin.running, twin.waiting = list(copies.values()), deque(map(_copy, self.waiting))
        twin._steps.extend(
            Step(step.seconds, [copies[id(one)] for one in step.gives]) for step in self._steps
        )
        twin._stepping, twin.left_s = self._stepping, self.left_s
        return twin._first_s(_copy(asked))

    def _first_s(self, asked: Asked) -> float:
        self.add(asked)
        spent_s, ends_s = 0.0, self.left_s if self._stepping else self.begin_step()
        while True:
            spent_s += ends_s
            self.end_step()
            if asked.given:
                return spent_s
            ends_s = self.begin_step()

    def _schedule(self) -> Step:
        law, budget, step_s = self.law, self.law.budget, 0.0
        gives: list[Asked] = []
        at = 0
        while budget:
            if at == len(self.running):
                if not self.waiting or at == law.seqs:
                    break
                self.running.append(self.waiting.popleft())
            one = self.running[at]
            at += 1
            tokens = min(one.prompt + one.scheduled - one.computed, budget)
            if one.scheduled == one.answer:
                continue  # its last token comes with the step before
            step_s += token_seconds(law, tokens, one.computed)
            one.computed += tokens
            budget -= tokens
            if one.computed == one.prompt + one.scheduled:
                one.scheduled += 1
                gives.append(one)
        return Step(law.fixed_s + step_s if budget < law.budget else 0.0, gives)

    def _update(self, gives: Sequence[Asked]) -> None:
        if any(one.given == one.answer for one in gives):
            self.running = [one for one in self.running if one.given < one.answer]


class ExactEngine(KnownEngine):
    """Predictions know all but what comes later: no model can be better."""

    exact = True


def token_seconds(law: Law, tokens: int, computed: int) -> float:
    """Seconds of these tokens of one request, after ``computed`` of it."""
    return law.token_s * tokens + law.context_s * tokens * (computed + tokens / 2)


def _copy(asked: Asked) -> Asked:
    return Asked(asked.prompt, asked.cached, asked.answer, asked.computed, asked.scheduled, asked.given)


Engine = Callable[[Law], KnownEngine]


class Rig:
    """A fleet of engines with one law, and the router's books; ``asked`` in order."""

    def __init__(self, law: Law, engines: int, seed: int, engine: Engine = KnownEngine) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.engines = [engine(law) for _ in range(engines)]
        rates = FleetRates()
        self.loads = [LoadAccount(rates.engine()) for _ in range(engines)]
        self.errors = [FirstTokenErrors() for _ in range(engines)]
        self.answered: list[Asked] = []
        self.target_s = math.inf
        """For the first token; requests that are predicted to miss it are refused."""
        self.uncached_tokens = 0
        """Of the request at hand."""
        self.refused: list[Asked] = []
        """``measured_s``: if they had been accepted, and none after them."""
        self.ends_s = [0.0] * engines
        self.counts = [0] * engines
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.later(self.rng.uniform(0, GAUGES_S), self._poll)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Let this happen in this many seconds."""
        heapq.heappush(self._calendar, (self.now + seconds, next(self._order), what))

    def probe(self) -> None:
        """Let each idle engine answer the prompts of a probe in two APIs; it compiles for the first one."""
        for engine, account in zip(self.engines, self.loads, strict=True):
            asked = [(PROBE_TOKENS, 0), (PROBE_TOKENS + 16, _blocks(PROBE_TOKENS))] * 2
            timed = [(prompt - held, engine.alone_s(Asked(prompt, held, 1))) for prompt, held in asked]
            timed[0] = PROBE_TOKENS, COLD * timed[0][1]
            account.rates.model.probed(timed)

    def run(self, until_s: float) -> None:
        """Everything up to this time."""
        while self._calendar[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._calendar)
            what()
        self.now = until_s

    def candidates(self, asked: Asked) -> list[Candidate]:
        """The engines as the router sees them."""
        found, hit = [], Hit(asked.cached, confidence="exact")
        for at, account in enumerate(self.loads):
            rate, interference_s = account.rates.current(self.now)
            queue_s, running, waiting, idle_s, late_s, recent_s, *_ = account.ahead(self.now, NO_OTHERS, rate)
            name = f"http://engine-{at}:8000"
            found.append(
                Candidate(
                    name, hit, queue_s, running, waiting, idle_s, rate, interference_s, late_s, recent_s
                )
            )
        return found

    def level_s(self, scored: ScoredCandidates, index: int, order: object = None) -> tuple[float, float]:
        """Predicted seconds of the request at hand, and the margin (``Predicting``)."""
        chosen, account, tokens = scored.candidates[index], self.loads[index], self.uncached_tokens
        work = account.asked(self.now, tokens, scored.prompt_tokens, chosen.running)
        return sum(account.rates.model.seconds(work)), self.errors[index].margin_s or 0.0

    def place(self, asked: Asked) -> tuple[int, Choice]:
        """The engine by cost, of those that are predicted to make the target if any is."""
        candidates, key = self.candidates(asked), next(self._order)
        choice = choose(candidates, asked.prompt, POLICY, prompt_key=key)
        if self.target_s == math.inf:
            return choice.index, choice
        self.uncached_tokens = choice.uncached_tokens
        met = level_met(choice, [self] * len(candidates), self.target_s)
        if met is None or not any(met):
            return choice.index, choice
        places = [at for at, good in enumerate(met) if good]
        choice = choose([candidates[at] for at in places], asked.prompt, POLICY, prompt_key=key)
        return places[choice.index], choice

    def ask(self, asked: Asked) -> None:
        """Place a request."""
        at, choice = self.place(asked)
        chosen, account, engine = choice.candidate, self.loads[at], self.engines[at]
        work = account.asked(self.now, choice.uncached_tokens, asked.prompt, chosen.running)
        asked.engine, asked.at_s = at, self.now
        parts = account.rates.model.seconds(work)
        asked.predicted_s = sum(parts)
        engine.left_s = max(0.0, self.ends_s[at] - self.now)
        if engine.exact:
            asked.predicted_s = engine.alone_s(asked)
        margin_s = self.errors[at].margin_of(asked.predicted_s)
        if late_first_token(asked.predicted_s, parts[0], self.target_s, margin_s) is not None:
            asked.measured_s = engine.alone_s(asked)
            self.refused.append(asked)
            return
        asked.ticket = account.admit(
            uncached_tokens=choice.uncached_tokens,
            now=self.now,
            expected_s=choice.cost.first_token_s,
            running=chosen.running,
            waiting=chosen.waiting,
            prompt_tokens=asked.prompt,
        )
        engine.add(asked)
        if not engine.works:
            self._begin(at)

    def _begin(self, at: int) -> None:
        engine = self.engines[at]
        engine.works = any(engine.counts)
        if engine.works:
            step_s = engine.begin_step()
            self.ends_s[at] = self.now + step_s
            self.later(step_s, lambda: self._end(at))

    def _end(self, at: int) -> None:
        account = self.loads[at]
        for asked in self.engines[at].end_step():
            assert asked.ticket is not None
            if asked.given == 1:
                asked.measured_s = self.now - asked.at_s
                self.errors[at].add("m", asked.predicted_s, asked.measured_s)
                sample = account.first_token(asked.ticket, self.now)
                account.rates.learn(sample, account.timed(asked.ticket), asked.measured_s, self.now)
                self.counts[at] += 1
                asked.number = self.counts[at]
                self.answered.append(asked)
            if asked.given == asked.answer:
                account.finish(asked.ticket, self.now)
                if asked.done is not None:
                    asked.done()
        self._begin(at)

    def _poll(self) -> None:
        for engine, account in zip(self.engines, self.loads, strict=True):
            running, waiting = engine.counts
            account.report(running=running, waiting=waiting, now=self.now)
        self.later(GAUGES_S, self._poll)


Prompts = Callable[[random.Random], Asked]


def _blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def mixed(rng: random.Random) -> Asked:
    """Chats, longer prompts, and next turns that are almost all cached."""
    kind, answer = rng.random(), rng.randint(20, 150)
    if kind < 0.6:
        return chats(rng)
    if kind < 0.8:
        return Asked(round(512 * 8 ** rng.random()), 0, answer)
    cached = _blocks(rng.randint(500, 4000))
    return Asked(cached + rng.randint(1, 64), cached, answer)


def chats(rng: random.Random) -> Asked:
    """Chats with 100 to 480 new tokens."""
    cached = rng.choice((0, _blocks(rng.randint(100, 4000))))
    return Asked(cached + rng.randint(100, 480), cached, rng.randint(20, 150))


def short(rng: random.Random) -> Asked:
    """Chats with short answers, none of it cached: engines do little but prefills."""
    return Asked(rng.randint(100, 480), 0, rng.randint(2, 8))


def cached(rng: random.Random) -> Asked:
    """Prompts with 1 to 16 new tokens."""
    held = _blocks(rng.randint(500, 4000))
    return Asked(held + rng.randint(1, 16), held, rng.randint(20, 150))


def long(rng: random.Random) -> Asked:
    """Long prompts, none of it cached."""
    return Asked(round(600 * 8 ** rng.random()), 0, rng.randint(20, 150))


def huge(rng: random.Random) -> Asked:
    """Up to 250,000 tokens."""
    return Asked(round(2000 * 125 ** rng.random()), 0, rng.randint(20, 150))


def mean_s(prompts: Prompts, law: Law) -> float:
    """Seconds of a prompt's prefill, on average."""
    rng, total = random.Random(0), 0.0
    for _ in range(1000):
        one = prompts(rng)
        new = one.prompt - one.cached
        total += law.fixed_s * -(-new // law.budget) + law.token_s * new
        total += law.context_s * new * (one.cached + new / 2)
    return total / 1000


def alone(rig: Rig, prompts: Prompts) -> None:
    """One request after the other, with pauses."""

    def again() -> None:
        one = prompts(rig.rng)
        one.done = lambda: rig.later(rig.rng.uniform(0.1, 1.0), again)
        rig.ask(one)

    rig.later(0.0, again)


def arrivals(rig: Rig, prompts: Prompts, busy: float) -> None:
    """Requests at random times that would keep each engine busy with prefills for this share of the time."""
    gap_s = mean_s(prompts, rig.engines[0].law) / busy / len(rig.engines)

    def again() -> None:
        rig.ask(prompts(rig.rng))
        rig.later(rig.rng.expovariate(1 / gap_s), again)

    rig.later(rig.rng.expovariate(1 / gap_s), again)


def closed(rig: Rig, prompts: Prompts, clients: int) -> None:
    """Clients that each always have one request open."""

    def again() -> None:
        one = prompts(rig.rng)
        one.done = again
        rig.ask(one)

    for _ in range(clients):
        rig.later(rig.rng.uniform(0, 1), again)


class State(NamedTuple):
    """One row: ``drive`` sends requests to ``engines``; those counted are answers ``first`` to ``first`` +
    ``answers`` of each engine, or with ``slower`` after engine 0's steps changed by this factor."""

    drive: Callable[[Rig], None]
    engines: int = 2
    first: int = 20
    answers: int = 300
    within_s: float = 0.0
    slower: float = 1.0
    probed: bool = False


OVERLOAD = "30 % overload"
STATES = {
    "idle": State(lambda rig: alone(rig, long), engines=1, answers=100),
    "first 10 s": State(lambda rig: arrivals(rig, mixed, 0.3), within_s=10.0),
    "first 10 s, probed": State(lambda rig: arrivals(rig, mixed, 0.3), within_s=10.0, probed=True),
    "light": State(lambda rig: arrivals(rig, mixed, 0.25)),
    "medium": State(lambda rig: arrivals(rig, mixed, 0.5)),
    "saturated": State(lambda rig: closed(rig, mixed, 32)),
    "short answers": State(lambda rig: closed(rig, short, 8)),
    "chats": State(lambda rig: arrivals(rig, chats, 0.5)),
    "twice slower": State(lambda rig: arrivals(rig, mixed, 0.25), slower=2.0, first=25, answers=100),
    "twice faster": State(lambda rig: arrivals(rig, mixed, 0.25), slower=0.5, first=25, answers=100),
    "chats slower": State(lambda rig: arrivals(rig, chats, 0.4), slower=2.0, first=25, answers=100),
    "only cached": State(lambda rig: arrivals(rig, cached, 0.2)),
    "huge": State(lambda rig: arrivals(rig, huge, 0.25), answers=150),
}


def run(state: State, law: Law, seed: int, engine: Engine = KnownEngine) -> tuple[Rig, list[Asked]]:
    """One run, and the requests of it that count."""
    rig = Rig(law, state.engines, seed, engine)
    if state.probed:
        rig.probe()
    state.drive(rig)
    if state.within_s:
        rig.run(state.within_s)
        rig.run(4 * state.within_s)
        return rig, [one for one in rig.answered if one.at_s <= state.within_s]
    step_s, until = 200 * law.token_s + law.fixed_s, state.first + state.answers

    def answer(engines: Sequence[int], most: int) -> None:
        while min(rig.counts[at] for at in engines) < most:
            rig.run(rig.now + 50 * step_s)

    if state.slower == 1.0:
        answer(range(state.engines), until)
        return rig, [one for one in rig.answered if state.first < one.number <= until]
    answer(range(state.engines), 200)
    before, factor = rig.counts[0], state.slower
    rig.engines[0].law = law._replace(
        fixed_s=law.fixed_s * factor, token_s=law.token_s * factor, context_s=law.context_s * factor
    )
    answer([0], before + until)
    changed = [one for one in rig.answered if one.engine == 0]
    return rig, [one for one in changed if state.first < one.number - before <= until]


class Shares(NamedTuple):
    """Shares of predictions within 10 % and 25 % of what was measured, the median of predicted through
    measured, and the number of answers."""

    within_10: float
    within_25: float
    ratio: float
    answers: int


def shares(state: State, law: Law, seeds: Iterable[int], engine: Engine = KnownEngine) -> Shares:
    """Over all seeds."""
    found = [one for seed in seeds for one in run(state, law, seed, engine)[1]]
    off = [abs(one.predicted_s - one.measured_s) / one.measured_s for one in found]
    ratios = sorted(one.predicted_s / one.measured_s for one in found)
    near, far = [sum(value <= most for value in off) / len(off) for most in (0.10, 0.25)]
    return Shares(near, far, ratios[len(ratios) // 2], len(found))


class Levels(NamedTuple):
    """Of accepted requests the share that met the target, of refused ones that would have missed it, and the
    number of both."""

    met: float
    missed: float
    accepted: int
    refused: int


def overload(law: Law, seeds: Iterable[int], busy: float = 1.05, engine: Engine = KnownEngine) -> Levels:
    """Service levels where 30 % more comes than the engines can do: beside decodes and in steps of their own,
    prefills keep them busy for 0.8 of the time (``closed``)."""
    accepted, refused, target_s = list[Asked](), list[Asked](), 4 * mean_s(mixed, law)
    for seed in seeds:
        rig = Rig(law, 2, seed, engine)
        rig.target_s = target_s
        arrivals(rig, mixed, busy)
        while min(rig.counts) < 400:
            rig.run(rig.now + 50 * law.fixed_s)
        began_s = min(one.at_s for one in rig.answered if one.number == 100)
        accepted += [one for one in rig.answered if one.at_s > began_s]
        refused += [one for one in rig.refused if one.at_s > began_s]
    met = sum(one.measured_s <= target_s for one in accepted) / len(accepted)
    missed = sum(one.measured_s > target_s for one in refused) / max(1, len(refused))
    return Levels(met, missed, len(accepted), len(refused))


class Row(NamedTuple):
    """One of the table: ``state`` is a key of ``STATES``, or ``OVERLOAD``."""

    law: str
    state: str
    found: Shares | Levels


def rows(
    laws: Iterable[str], states: Iterable[str], seeds: int, engine: Engine = KnownEngine
) -> Iterator[Row]:
    """The table. The first 10 s have few answers, and overload few refusals, and so more seeds."""
    for law in laws:
        for name in states:
            if name == OVERLOAD:
                yield Row(law, name, overload(LAWS[law], range(3 * seeds), engine=engine))
            else:
                state = STATES[name]
                runs = range(10 * seeds if state.within_s else seeds)
                yield Row(law, name, shares(state, LAWS[law], runs, engine))


def line(row: Row) -> str:
    """One line of the table."""
    found = row.found
    if isinstance(found, Levels):
        met, missed = f"{found.met:.0%} of {found.accepted}", f"{found.missed:.0%} of {found.refused}"
        return (
            f"| {row.law} | {row.state} | {met} accepted met the target | {missed} refused would have missed "
            "it | | |"
        )
    near, far = f"{found.within_10:.0%}", f"{found.within_25:.0%}"
    return f"| {row.law} | {row.state} | {near} | {far} | {found.ratio:.2f} | {found.answers} |"


HEAD = """| law | state | within 10 % | within 25 % | median predicted / measured | answers |
| --- | --- | --- | --- | --- | --- |"""


def arguments(parser: argparse.ArgumentParser, seeds: int, laws: Sequence[str]) -> argparse.Namespace:
    """Options of the table, with these as defaults."""
    states = [*STATES, OVERLOAD]
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--laws", nargs="+", choices=list(LAWS), default=laws)
    parser.add_argument("--states", nargs="+", choices=states, default=states)
    return parser.parse_args()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--exact", action="store_true", help="predict by a twin of the engine: the best there is"
    )
    args = arguments(parser, 3, list(LAWS))
    print(HEAD)
    for row in rows(args.laws, args.states, args.seeds, ExactEngine if args.exact else KnownEngine):
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
