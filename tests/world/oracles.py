"""Properties of every world. Each oracle yields texts of violations, under its name in
``Violation.oracle``.

``ends``: every request ends once, within bounded virtual time, with an answer, a clear error or an end that a
fault explains. ``text``: an answer is what the engine's model computes for that prompt. ``left``: after
quiet, nothing is left of any request, and after the end nothing of a router. ``receipts``: in quiet, every
prediction is exact. ``tenants``: a tenant's cached tokens are of prompts that it sent itself. ``work``:
charges, usage lines and metrics are equal to each other, to what clients were told, and to what engines did.
``order``: engines that schedule by priority compute prompts in the order that predictions rest on.
``leases``: in quiet each engine has one follower, and after the end Redis has nothing of a router.
``turns``: no turn of the loop makes more calls than ``CALLS_MAX``. ``faults``: no exception is left
unhandled, and the fleet is whole again after all faults.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from kvatlas.publisher.simulator.model import WRONG_MARK
from kvatlas.router.api.metrics_page import RouterCollector
from kvatlas.router.http.request_cycle import RequestCycle
from kvatlas.router.observe.usage import UsageLine
from kvatlas.router.placement.engine_order import BAND_MS
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.leases import Lease, parse_leases
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.replication.shared_load import FLEET_SCOPE
from tests.world.clients import PATIENCE_S, Exchange, Told, told
from tests.world.faults import Faults
from tests.world.fleet import REDIS, Fleet, Serving, Work, engine_host, on, router_host, router_replica
from tests.world.machines import PROCESS
from tests.world.plan import MODEL, OPENAI, Plan
from tests.world.truth import Expected

CALLS_MAX = 20_000
"""Calls of Python functions in one turn of the loop, after the first chat, which compiles its template: some
3 ms. Most worlds stay below 7,000; with replicas a script of the stand-in for Redis makes 15,000."""
BEFORE_S = 6.0
"""A request that began so long after a fault's window may still meet connections of before."""
_SHOWN_CHARS = 60
_BLOCK_TOKENS = 16
_CLIENTS = re.compile(r"-[rq]\d+-\d+")
"""In the ids that engines give to requests of clients."""
_BLOCKS, _LOAD_ONLY = (ScopeKeys(IndexSettings().namespace, scope) for scope in (MODEL, FLEET_SCOPE))


class Violation(msgspec.Struct, frozen=True):
    """``oracle``: which; ``text``: what was seen, where and when."""

    oracle: str
    text: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.text}"


class Judged(msgspec.Struct):
    """One exchange beside what it should be."""

    exchange: Exchange
    expected: Expected
    told: Told | None = None
    """Body of its answer with status 200, if readable."""

    def read(self) -> None:
        request, answer = self.exchange.request, self.exchange.answer
        if answer.end == "complete" and answer.status == 200:
            with suppress(ValueError, KeyError, TypeError, IndexError):
                self.told = told(request.api, answer.body, stream=request.stream)


# Answers.


def excused_codes(plan: Plan) -> frozenset[str]:
    """Codes of refusals that this configuration asks for."""
    codes: set[str] = set()
    queue, policy = plan.config.get("queue", {}), plan.config.get("policy", {})
    if queue.get("saturation_s") is not None:
        codes |= {"queue_full", "queue_timeout"}
    if policy.get("slo_refuse", "off") != "off" or any(name.startswith("wait_target") for name in queue):
        codes.add("predicted_wait")
    limits = {"requests_per_minute", "uncached_tokens_per_minute", "concurrent_requests"}
    if any(limits & rules.keys() for rules in plan.tenants.values()):
        codes.add("rate_limit_exceeded")
    return frozenset(codes)


def asked(judged: Judged, fleet: Fleet) -> set[str]:
    """Machines of the engines that a request was at: the one that answered or got the last attempt, the one
    that computed its prompt for it, and all whose schedulers had it."""
    one = judged.exchange
    lines = (line for line in fleet.lines() if line.request_id == one.request_id)
    urls = [one.engine, *(url for line in lines for url in (line.engine, line.prefill_engine))]
    hosts = {url.removeprefix("http://").partition(":")[0] for url in urls if url}
    return hosts | {engine_host(work.engine) for work in fleet.works.get(one.request_id, ())}


def judge_answer(
    judged: Judged, fleet: Fleet, faults: Faults, others: Sequence[Judged] = ()
) -> Iterator[Violation]:
    """One exchange: its end, and its text. After everything, when all is known of it and of the faults."""
    one, answer, plan = judged.exchange, judged.exchange.answer, fleet.plan
    where = _where(judged, faults.begin_s)
    router, engines = router_host(one.request.router), asked(judged, fleet)

    def explained(end: str) -> bool:
        times = one.began_s - BEFORE_S, one.ended_s
        if faults.explain(end, *times, {router, *engines}):
            return True
        return not engines and all(faults.gone(end, *times, engine_host(i)) for i in _able(judged, plan))

    if answer.end == "left":
        return
    if answer.end == "silent":
        if not explained("silent"):
            yield Violation("ends", f"no end in {PATIENCE_S:.0f} s: {where}")
        return
    if answer.more:
        yield Violation(
            "ends", f"{len(answer.more)} bytes after the end, {answer.more[:_SHOWN_CHARS]!r}: {where}"
        )
    if answer.end in {"cut", "refused"}:
        if not explained("cut"):
            yield Violation("ends", f"{answer.end} without a fault: {where}")
        return
    if answer.status != 200:
        excused = explained("error") or (not engines and _died_before(judged, fleet, faults, others))
        yield from _judge_error(judged, plan, where, excused)
    else:
        yield from _judge_success(judged, plan, where, explained("cut"))


def _died_before(judged: Judged, fleet: Fleet, faults: Faults, others: Sequence[Judged]) -> bool:
    """Whether engines may have died with the same request: then no other one gets it for a while."""
    one = judged.exchange
    if b'"engine_died"' not in one.answer.body and b'"request_ends_engines"' not in one.answer.body:
        return False
    alike = (other for other in others if other.expected.prompt == judged.expected.prompt)
    hosts = set[str]().union(*(asked(other, fleet) for other in alike))
    return faults.explain("cut", one.began_s - ProxySettings().suspect_s, one.ended_s, hosts)


def _able(judged: Judged, plan: Plan) -> Iterator[int]:
    """Engines that can take the request, of those that are there from the start."""
    tokens = max(len(one) for one in judged.expected.sequences)
    for i, engine in enumerate(plan.engines):
        serves = i not in plan.spare and engine.get("role") != "prefill"
        if serves and engine.get("max_model_len", tokens) >= tokens:
            yield i


def _judge_success(judged: Judged, plan: Plan, where: str, explained: bool) -> Iterator[Violation]:
    request, answer = judged.exchange.request, judged.exchange.answer
    said = judged.told
    if said is None:
        yield Violation("ends", f"unreadable answer {answer.body[-_SHOWN_CHARS:]!r}: {where}")
        return
    # An engine that is terminated says "completed" on /v1/responses, whose bodies know no abort.
    aborted = explained and request.api == "responses" and judged.expected.text.startswith(said.text)
    if not aborted:
        yield from _judge_text(said, judged.expected, plan, where)
    if said.whole and not said.error and said.choices != request.prompts * request.answers:
        yield Violation("text", f"{said.choices} choices: {where}")
    if len(said.names) > 1 or said.roles > said.choices:
        yield Violation("text", f"{sorted(said.names)} in one stream, begun {said.roles} times: {where}")
    if said.reason not in {"length", "stop"} and not explained:
        yield Violation("ends", f"ended by {said.error or said.reason!r} without a fault: {where}")
    if not said.whole and not said.error:
        yield Violation("ends", f"stream without its end, reason {said.reason!r}: {where}")


def _judge_error(judged: Judged, plan: Plan, where: str, explained: bool) -> Iterator[Violation]:
    answer = judged.exchange.answer
    try:
        error = json.loads(answer.body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        yield Violation("ends", f"unclear error {answer.status} {answer.body[:_SHOWN_CHARS]!r}: {where}")
        return
    if not message:
        yield Violation("ends", f"error {answer.status} without a message: {where}")
    if code in excused_codes(plan) or (
        judged.exchange.request.api == "messages" and answer.status == 429 and excused_codes(plan)
    ):
        return
    if answer.status == 400 or not explained:
        yield Violation("ends", f"{answer.status} {code} without a fault, {message[:120]!r}: {where}")


def _judge_text(said: Told, expected: Expected, plan: Plan, where: str) -> Iterator[Violation]:
    whole, text = expected.text, said.text
    shown = f"{text[:_SHOWN_CHARS]!r} for {whole[:_SHOWN_CHARS]!r}"
    if not whole.startswith(text):
        what = "from the KV cache of another prompt," if WRONG_MARK in text else "wrong text"
        yield Violation("text", f"{what} {shown}: {where}")
    elif said.reason in {"length", "stop"} and text != whole and not _filled(said, expected, plan):
        yield Violation("text", f"a part of the text as the whole ({said.reason}), {shown}: {where}")


def _filled(said: Told, expected: Expected, plan: Plan) -> bool:
    """Whether the answer ended since the engine's longest context was full."""
    if said.reason != "length":
        return False
    rooms = (one.get("max_model_len", 0) - len(expected.prompt) for one in plan.engines)
    return said.text in {expected.beginning(room) for room in rooms if room > 0}


def _where(judged: Judged, begin_s: float) -> str:
    one = judged.exchange
    request = one.request
    stream = "stream" if request.stream else "whole"
    times = f"{one.began_s - begin_s:.3f}-{one.ended_s - begin_s:.3f}"
    length = f"{len(judged.expected.prompt)}+{request.answer_tokens}"
    return f"{one.request_id} {one.path} {length} {stream} at {times} from {one.engine or 'no engine'}"


# Tenants.


class Prompts:
    """Requests of each tenant, with the answers it may have got."""

    def __init__(self) -> None:
        self._sent: dict[str, list[tuple[str, list[int]]]] = {}

    def sent(self, tenant: str, request_id: str, expected: Expected) -> None:
        self._sent.setdefault(tenant, []).extend((request_id, ids) for ids in expected.sequences)

    def own(self, tenant: str, request_id: str, prompt: list[int]) -> int:
        """The longest prefix that another prompt of this tenant shares, in tokens."""
        return max(
            (common(ids, prompt) for name, ids in self._sent.get(tenant, ()) if name != request_id), default=0
        )


def common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def judge_isolation(judged: Judged, prompts: Prompts, fleet: Fleet, begin_s: float) -> Iterator[Violation]:
    """With isolation, cached tokens are at most what this tenant itself has sent."""
    one, said = judged.exchange, judged.told
    if one.request.prompts * one.request.answers > 1:
        return  # the hit may be on what a sibling has just computed
    engines = [work.engine for work in fleet.works.get(one.request_id, ())]
    if engines and engines.count(engines[-1]) > 1:
        return  # or an earlier attempt, as at an engine that hung
    cached = 0 if said is None else said.cached_tokens or 0
    if cached:
        own = prompts.own(one.request.tenant, one.request_id, judged.expected.prompt)
        if cached > own:
            where = _where(judged, begin_s)
            yield Violation(
                "tenants", f"{cached} cached tokens, prompts of {one.request.tenant} share {own}: {where}"
            )


# Work: charges, usage lines, metrics and engines.


def judge_work(judged: Iterable[Judged], fleet: Fleet, plan: Plan) -> Iterator[Violation]:
    """All requests of the world, after quiet."""
    by_id = {one.exchange.request_id: one for one in judged}
    lines: dict[str, list[UsageLine]] = {}
    for line in fleet.lines():
        lines.setdefault(line.request_id, []).append(line)
    calm = not plan.faults
    for request_id, one in by_id.items():
        yield from _judge_line(one, lines.get(request_id, []), fleet, plan)
        if not plan.gateway:
            yield from _judge_engines(one, lines.get(request_id, []), fleet, plan, calm=calm)
    for serving in fleet.serving.values():
        yield from _judge_charges(serving, calm=calm)
        if calm:
            yield from _judge_metrics(serving)


def _judge_line(one: Judged, lines: list[UsageLine], fleet: Fleet, plan: Plan) -> Iterator[Violation]:
    """A request has one line, and it says what the client was told."""
    exchange = one.exchange
    answer, request_id = exchange.answer, exchange.request_id
    if len(lines) > 1:
        yield Violation("work", f"{len(lines)} usage lines of {request_id}")
        return
    if answer.end != "complete":
        return
    if not lines:
        if not (plan.gateway and not exchange.engine):
            yield Violation("work", f"no usage line of {request_id}, status {answer.status}")
        return
    (line,) = lines
    if plan.gateway and b'"code": "gateway"' in answer.body:
        return  # the gateway's own error beside the picker's
    if line.status != answer.status:
        yield Violation(
            "work", f"usage line with status {line.status} of {request_id}, which got {answer.status}"
        )
    if exchange.request.tenant != line.tenant:
        yield Violation("work", f"usage line of {line.tenant!r} for a request of {exchange.request.tenant!r}")
    said = one.told
    if said is None or not said.whole or said.error or said.reason not in {"length", "stop"}:
        return
    for name, (written, right) in _right(line, said, one, fleet, plan).items():
        if written not in right:
            yield Violation("work", f"usage line of {request_id}: {name} {written}, right is {right}")


def _right(
    line: UsageLine, said: Told, one: Judged, fleet: Fleet, plan: Plan
) -> dict[str, tuple[int | None, set[int | None]]]:
    """A line, and its permitted values by the client's answer, else by the engines' work."""
    exchange, request = one.exchange, one.exchange.request
    if said.prompt_tokens is None:
        if request.api not in OPENAI or plan.gateway or not (done := _computed(one, fleet)):
            return {}
        prompt, generated = done
        if continued(one, fleet) and "stop" in request.body:
            # Its last engine does not know the strings, and computes on until its connection is closed.
            return {"prompt_tokens": (line.prompt_tokens, {prompt})}
        return {
            "prompt_tokens": (line.prompt_tokens, {prompt}),
            "generated_tokens": (line.generated_tokens, {generated}),
        }
    right: dict[str, tuple[int | None, set[int | None]]] = {
        "prompt_tokens": (line.prompt_tokens, {said.prompt_tokens}),
        "generated_tokens": (line.generated_tokens, {said.generated_tokens}),
    }
    hits = {said.cached_tokens, *_prefill_hits(exchange, fleet, plan)}
    if request.prompts == request.answers == 1 and None not in hits:
        # Of several, an engine reports one hit, which may be on what a sibling has just computed.
        computed: set[int | None] = {said.prompt_tokens - (hit or 0) for hit in hits}
        right |= {
            "cached_tokens": (line.cached_tokens, hits),
            "computed_tokens": (line.computed_tokens, computed),
        }
    return right


def _finished(request_id: str, fleet: Fleet) -> list[Work]:
    return [
        work for work in fleet.works.get(request_id, ()) if work.request.finish_reason in ("length", "stop")
    ]


def _computed(one: Judged, fleet: Fleet) -> tuple[int, int] | None:
    """Prompt and output tokens of an answer by the engines that finished it; None: none did. Where a stream
    went on elsewhere, the last engine's prompt has the beginning of the answer."""
    request = one.exchange.request
    finished = _finished(one.exchange.request_id, fleet)
    done = finished[-request.prompts * request.answers :]
    if not done:
        return None
    if len(done) == 1:
        # Others computed what a stream had, before it went on there.
        done = [max(finished, key=lambda work: len(work.request.prompt) + len(work.request.output))]
    prompt = sum(len(work.request.prompt) for work in done) // request.answers
    generated = sum(len(work.request.output) for work in done)
    kept = prompt - len(one.expected.prompt) if request.prompts == request.answers == 1 else 0
    return prompt - kept, generated + kept


def continued(one: Judged, fleet: Fleet) -> bool:
    """Whether an engine was asked for the rest of an answer."""
    works = fleet.works.get(one.exchange.request_id, ())
    single = one.exchange.request.prompts == 1
    return single and any(len(work.request.prompt) > len(one.expected.prompt) for work in works)


def _prefill_hits(exchange: Exchange, fleet: Fleet, plan: Plan) -> set[int | None]:
    """Of a request that was split: the decode engine's report may count what came from the prefill engine as
    cached; the work is what the prefill engine had not cached."""
    works = fleet.works.get(exchange.request_id, ())
    return {
        work.request.cached_tokens
        for work in works
        if plan.engines[work.engine].get("role") == "prefill" and work.request.finish_reason == "length"
    }


def _judge_engines(
    one: Judged, lines: list[UsageLine], fleet: Fleet, plan: Plan, *, calm: bool
) -> Iterator[Violation]:
    """Engines did what the line says, and, without a fault, nothing twice."""
    request_id, said = one.exchange.request_id, one.told
    request = one.exchange.request
    if request.api not in OPENAI:
        return
    works = fleet.works.get(request_id, [])
    legs = (2 if plan.kind == "pd" else 1) * request.prompts * request.answers
    if calm and len(works) > legs:
        yield Violation("work", f"{request_id} was computed {len(works)} times")
    if said is None or not said.whole or said.error or said.reason not in ("length", "stop"):
        return
    if continued(one, fleet):
        rests = [work.request.prompt[len(one.expected.prompt) :] for work in works]
        if any(rest != one.expected.answer[: len(rest)] for rest in rests):
            yield Violation("work", f"{request_id} was continued from other tokens than its own")
        if "stop" in request.body:
            return  # the router ends it, within what the engine computes
    done = _computed(one, fleet)
    if done is None:
        yield Violation("work", f"no engine finished {request_id}")
        return
    prompt, generated = done
    if said.generated_tokens not in (None, generated) or said.prompt_tokens not in (None, prompt):
        text = f"{said.prompt_tokens}+{said.generated_tokens} told, {prompt}+{generated} computed"
        yield Violation("work", f"{request_id}: {text}")


def _judge_charges(serving: Serving, *, calm: bool) -> Iterator[Violation]:
    gate = serving.router.gate
    if gate is not None:
        for name, stats in gate.tenants().items():
            charged = sum(line.computed_tokens or 0 for line in serving.lines if line.tenant == name)
            if stats.uncached_tokens != charged:
                text = f"{name} is charged {stats.uncached_tokens} tokens, its lines say {charged}"
                yield Violation("work", text)
    if not calm:
        return
    claims: dict[int, list[float]] = {}
    for claim, tokens in serving.charges:
        claims.setdefault(id(claim), []).append(tokens)
    for claim, _ in serving.charges:
        if len(charges := claims.pop(id(claim), [])) > 1:
            yield Violation("work", f"a request of {claim.tenant} is charged {len(charges)} times: {charges}")


def _judge_metrics(serving: Serving) -> Iterator[Violation]:
    """The page's counts of requests are those of the lines."""
    samples: list[Sample] = []
    for family in RouterCollector(serving.router.sources).collect():
        if family.name == "kvatlas_requests":
            samples += family.samples
    shown = Counter[str]()
    for sample in samples:
        if sample.name == "kvatlas_requests_total":
            shown[sample.labels["status"]] += int(sample.value)
    written = Counter(line.outcome for line in serving.lines)
    if shown != written:
        yield Violation("work", f"metrics count {dict(shown)}, usage lines {dict(written)}")


# Order in engines that schedule by priority.


def judge_order(judged: list[Judged], fleet: Fleet, plan: Plan) -> Iterator[Violation]:
    """A request has the priority of its class. Without a fault, and but for requests of other classes and of
    clients that left, it gets what it was predicted also where it waited for the prompt whose blocks it was
    to hit: it was put behind that."""
    if not plan.config.get("policy", {}).get("engine_priority"):
        return
    by_id = {one.exchange.request_id: one for one in judged}
    for request_id, works in fleet.works.items():
        if request_id not in by_id:
            # Of a probe, which goes last.
            first = min(work.request.priority for work in works)
            if first < 2 * BAND_MS:
                yield Violation("order", f"priority {first} of {request_id}, which no client has sent")
            continue
        request = by_id[request_id].exchange.request
        band = _BANDS[request.fields.get("x-kvatlas-priority", "")]
        for work in works:
            if work.request.priority // BAND_MS != band or not work.request.priority:
                yield Violation("order", f"priority {work.request.priority} of {request_id}, class {band}")
    if plan.faults:
        return
    for serving in fleet.serving.values():
        for receipt in serving.router.accounts.receipts.latest:
            if receipt.outcome in {"over", "under"} and not _other_order(receipt.request_id, by_id, fleet):
                told = f"{receipt.outcome} {receipt.predicted_tokens} predicted ({receipt.mode})"
                yield Violation("order", f"{told}: {_where(by_id[receipt.request_id], fleet.loop.time())}")


_BANDS = {"": 0, "low": 1, "high": -1}


def _other_order(request_id: str, by_id: dict[str, Judged], fleet: Fleet) -> bool:
    """Whether an engine had the request beside one with the same beginning that is of another class, or whose
    client left."""
    return any(
        other.engine == work.engine
        and common(other.request.prompt, work.request.prompt) >= _BLOCK_TOKENS
        and (
            (other_id in by_id and by_id[other_id].exchange.answer.end == "left")
            or other.request.priority // BAND_MS != work.request.priority // BAND_MS
        )
        for work in fleet.works[request_id]
        for other_id, others in fleet.works.items()
        for other in others
    )


# Nothing is left.


def judge_books(fleet: Fleet) -> Iterator[Violation]:
    """After quiet: no request is open in any account of a router, nor at an engine."""
    for serving in fleet.serving.values():
        for text in _books(serving, fleet.loop.time()):
            yield Violation("left", f"router {serving.number}: {text}")
    for i, engine in fleet.engines.items():
        if i in fleet.down:
            continue
        scheduler = engine.scheduler
        open_ = [*scheduler._running, *scheduler._loading, *(request for request, _ in scheduler._waiting)]
        config = fleet.plan.config
        if "isolate" in config.get("keys", {}) or config.get("fleet", {}).get("probe"):
            # A router tries again what an engine has not proven, also in quiet.
            open_ = [request for request in open_ if _CLIENTS.search(request.request_id)]
        if open_:
            yield Violation("left", f"engine {i} has {[request.request_id for request in open_]}")
        if engine.connector is not None and (awaited := engine.connector.awaited()):
            yield Violation("left", f"engine {i} keeps blocks for {awaited}")


def _books(serving: Serving, now: float) -> Iterator[str]:
    router = serving.router
    accounts, proxy = router.accounts, router.proxy
    yield from (f"prompts in flight: {text}" for text in accounts.inflight.check_integrity())
    for engine in router.fleet:
        yield from (f"load of {engine.engine_id}: {text}" for text in engine.load.check_integrity())
        load = engine.load.current(now)
        open_ = load.running + load.waiting - load.foreign
        if open_ or load.awaited_tokens:
            yield f"load of {engine.engine_id}: {open_} requests, {load.awaited_tokens} tokens"
    stats = accounts.load_stats
    if stats.admitted != stats.finished + stats.failed:
        yield f"admitted {stats.admitted}, finished {stats.finished}, failed {stats.failed}"
    if proxy.stats.requests_active or proxy.requests.live:
        yield f"{proxy.stats.requests_active} requests active, {len(proxy.requests.live)} records open"
    if accounts.room is not None and len(accounts.room):
        yield f"{len(accounts.room)} requests in the queue"
    if accounts.integrity_problems:
        yield f"{accounts.integrity_problems} problems of integrity"
    for name, origin in proxy.client.origins.items():
        if origin.open != len(origin.idle):
            yield f"{origin.open} connections to {name}, {len(origin.idle)} idle"
    if router.gate is not None:
        for name, tenant in router.gate.tenants().items():
            if tenant.active:
                yield f"{tenant.active} requests of {name} active"


def judge_leases(fleet: Fleet) -> Iterator[Violation]:
    """In quiet, of several routers one follows each engine, or leads where only load is shared, by the lease
    that Redis has."""
    leases = _leases(fleet)
    if leases is None or not fleet.redis_up:
        return
    engines = [f"http://{engine_host(i)}:8000" for i in sorted(fleet.listed)]
    for engine_id in engines if _keys(fleet) is _BLOCKS else ["fleet"]:
        lease, following = leases.get(engine_id), []
        for serving in fleet.serving.values():
            index = serving.router.peers.shared
            assert index is not None
            if (held := index.lease_manager.held.get(engine_id)) is not None:
                following.append((index.replica, held.token))
        stored = [] if lease is None or not lease.held else [(lease.holder, lease.token)]
        if len(following) != 1 or following != stored:
            yield Violation("leases", f"{engine_id} is followed by {following}, the lease is of {stored}")


def judge_released(fleet: Fleet) -> Iterator[Violation]:
    """After the regular end of all routers Redis has no lease, heartbeat or load of any of them, and nothing
    that stays for ever. ``remove_candidate`` leaves the lease of an engine that left to its time."""
    leases = _leases(fleet)
    if leases is None or not fleet.redis_up:
        return
    for engine_id, lease in leases.items():
        if lease.held:
            yield Violation("leases", f"{lease.holder} has the lease of {engine_id} after its end: {lease}")
    ended = {router_replica(r).encode() for r in range(fleet.plan.routers)}
    assert fleet.redis is not None
    client = fleet.redis.client()
    for name in ("replicas", "load"):
        if left := ended & set(client.hkeys(getattr(_keys(fleet), name))):
            yield Violation("leases", f"{name} of {sorted(left)} after their end")
    with on(REDIS):
        for key in client.scan_iter():
            if client.pttl(key) == -1:
                yield Violation("leases", f"{key!r} has no time to live")


def _leases(fleet: Fleet) -> dict[str, Lease] | None:
    """Leases by engine, as in Redis; None without Redis."""
    if fleet.redis is None:
        return None
    with on(REDIS):
        client = fleet.redis.client()
        return parse_leases(client.hgetall(_keys(fleet).leases), client.time())


def _keys(fleet: Fleet) -> ScopeKeys:
    return _LOAD_ONLY if fleet.plan.kind == "load-only" else _BLOCKS


def judge_stopped(fleet: Fleet) -> Iterator[Violation]:
    """After the regular end of all routers: no socket, connection or timer of theirs."""
    hosts = {router for router in fleet.hosts() if router.startswith("10.1.")}
    for socket in list(fleet.loop.zmq.open):
        if socket.machine in hosts and not fleet.killed(socket.process):
            yield Violation("left", f"a ZMQ socket of kind {socket.kind} of {socket.machine}")
    for transport in list(fleet.net.transports):
        if transport.machine in hosts and transport.here[0] in hosts:
            yield Violation("left", f"a connection {transport.here} to {transport.there}")
    for timer in fleet.timers():
        yield Violation("left", f"a timer: {timer}")


def judge_end(fleet: Fleet) -> Iterator[Violation]:
    """After the end of everything: no task, and no unhandled exception."""
    me = asyncio.current_task()
    for task in asyncio.all_tasks():
        coro: Any = task.get_coro()
        if task is not me and not fleet.loop.is_killed(task) and not fleet.killed(_process(coro)):
            yield Violation("left", f"a task: {coro.__qualname__}")
    for text in fleet.loop.errors:
        yield Violation("faults", f"unhandled: {text}")


def _process(coro: Any) -> int:
    """The process of a request's task, which the listener makes without the loop; 0 for all others."""
    owner = coro.cr_frame.f_locals.get("self") if coro.cr_frame is not None else None
    if not isinstance(owner, RequestCycle):
        return 0
    transport: Any = owner._connection.transport
    return int(transport.context.get(PROCESS, 0))


# Receipts.


def outcomes(fleet: Fleet) -> Counter[str]:
    """Receipts by outcome, of all routers that run."""
    found = Counter[str]()
    for serving in fleet.serving.values():
        serving.router.accounts.books.settle()
        for engine in serving.router.fleet:
            found.update({str(word): number for word, number in engine.receipts.outcomes.items()})
    return found


def handoffs(fleet: Fleet) -> int:
    """Decodes behind a prefill elsewhere, of all routers that run: their receipts have no prediction."""
    return sum(one.router.proxy.pd_stats.handoffs for one in fleet.serving.values())


def judge_receipts(
    before: Counter[str], after: Counter[str], fleet: Fleet, plan: Plan, decodes: int
) -> Iterator[Violation]:
    """In quiet, a prediction is exact; of an engine that has stored nothing since its start nothing is known
    yet, and of ``decodes`` behind a prefill elsewhere none is made."""
    got = after - before
    inexact = {word: number for word, number in got.items() if word != "exact"}
    silent = [i for i, one in enumerate(plan.engines) if not one.get("publish_events", True)]
    if silent:
        return  # an estimate by design
    if inexact.get("unpredicted", 0) <= len(plan.engines) * plan.routers + decodes:
        inexact.pop("unpredicted", None)
    if inexact:
        hosts = [engine_host(i) for i in sorted(fleet.listed)]
        yield Violation("receipts", f"in quiet: {dict(got)} at {hosts}")
