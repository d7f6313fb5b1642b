"""Checks of a small generated load (``kvatlas certify``).

Each request has four sources of evidence: the hit predicted from events, the hit the engine reported
(``cached_tokens``), the first token from which it stored computed blocks, and its counters on ``/metrics``. A
disagreement shows which one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from router.tools.doctor.evidence import EngineEvidence, LoadEvidence, LoadRequest
from router.tools.doctor.findings import CheckResult, engine_check, error, info, ok, warning
from router.tools.doctor.gather.listener import ReplayState

Outcome = Literal["exact", "phantom", "over", "under", "unpredicted", "unknown"]
_REPORT = "report it to the maintainers of the engine, with the output of --json"


def actual(one: LoadRequest) -> int | None:
    """Return the real hit: from the stored blocks if they show it, otherwise as reported."""
    cached, stored = one.request.cached, one.stored
    if stored is not None and stored.computed_from is not None:
        return cached if cached is not None and stored.begins(cached) else stored.computed_from
    return cached


def outcome(one: LoadRequest, alignment: int) -> Outcome:
    """Compare the prediction with the real hit.

    ``phantom``: blocks held according to events were computed again, and more of them than the last unit,
    which a drafter's lookup drops.
    """
    predicted, real = one.request.predicted, actual(one)
    if predicted is None:
        return "unpredicted"
    if real is None:
        return "unknown"
    if predicted == real:
        return "exact"
    if predicted < real:
        return "under"
    return "phantom" if _witnessed(one) and predicted - real > alignment else "over"


def _compared(engine: EngineEvidence) -> list[tuple[LoadRequest, Outcome]]:
    load, residency = engine.load, engine.residency
    if load is None:
        return []
    layout = None if residency is None else residency.layout
    alignment = 1 if layout is None else layout.alignment
    answered = [one for one in load.requests if not one.request.status]
    compared = [(one, outcome(one, alignment)) for one in answered]
    if any(_untrue(one) for one in answered):  # without stored blocks an untrue report proves nothing
        compared = [(one, how if _witnessed(one) else "unknown") for one, how in compared]
    if any(
        how == "phantom" for _, how in compared
    ):  # a single unit is then a phantom too, not a drafter's dropped block
        compared = [(one, "phantom" if how == "over" and _witnessed(one) else how) for one, how in compared]
    return compared


def _witnessed(one: LoadRequest) -> bool:
    return one.stored is not None and one.stored.computed_from is not None


def _untrue(one: LoadRequest) -> bool:
    cached = one.request.cached
    return cached is not None and one.stored is not None and not one.stored.begins(cached)


def _shown(one: LoadRequest) -> str:
    request, stored = one.request, one.stored
    text = f"{one.kind}: predicted {request.predicted}, reported {request.cached}"
    if stored is not None and stored.computed_from is not None:
        text += f", stored from token {stored.computed_from} on"
    return f"{text}, of {request.reported_prompt_tokens or request.prompt_tokens} tokens"


@engine_check("load.answers")
def answers(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that all requests were answered."""
    load = engine.load
    if load is None:
        return
    failed = [one for one in load.requests if one.request.status]
    if load.problem:
        yield error(f"the load was aborted: {load.problem}", "a response of an unexpected shape", _REPORT)
    for one in failed[:1]:
        yield error(
            f"{one.kind}: {one.request.status}",
            "the engine does not serve this kind of request, or it terminated",
            "look at the engine's log",
        )
    if load.requests and not failed and not load.problem:
        late = "; the time limit ended the load early" if load.out_of_time else ""
        yield ok(f"{load.sent} requests answered{late}")


@engine_check("load.idle")
def idle(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the engine was idle: other requests evict blocks and are counted too."""
    load = engine.load
    if load is None or not load.after.requests:
        return
    if foreign := _foreign(load):
        yield warning(
            f"{foreign} requests of other clients finished at the engine during the load",
            "another client uses the engine",
            "take it out of service while it is certified",
        )


@engine_check("load.replay")
def replay(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the replay socket returns what was published."""
    again = None if engine.load is None else engine.load.replay
    if again is None:
        return
    if again.state is not ReplayState.COMPLETE:
        yield error(
            f"the replay socket did not return everything ({again.state})",
            "the engine answers the first request for history only, or its send queue overflowed",
            "look at the engine's log; a large buffer_steps needs a large hwm",
        )
    elif again.missing or again.different:
        yield error(
            f"of {again.received} batches received live {again.missing} are missing in replay, "
            f"{again.different} differ",
            "the buffer drops or rewrites batches",
            _REPORT,
        )
    elif again.received:
        yield ok(f"replay gives all {again.received} batches that were received live")


@engine_check("load.tokens")
def tokens(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare the tokens of prompts with those of the events and with the reported lengths."""
    compared = _compared(engine)
    for one, _ in compared:
        ours, theirs = one.request.prompt_tokens, one.request.reported_prompt_tokens
        differs = None if one.stored is None else one.stored.token_differs_at
        if differs is not None or one.request.lengths_differ:
            where = f"its events differ from token {differs} on" if differs is not None else "in length"
            yield error(
                f"{one.kind}: {ours} tokens here, {theirs} at the engine; {where}",
                "a different tokenizer or chat template, or events with other tokens than were computed",
                "see tokens.parity; give the tokenizer directory that the engine loaded",
            )
            return
    matched = sum(_witnessed(one) for one, _ in compared)
    if matched:
        yield ok(f"tokens in the events of {matched} prompts equal those computed here")


@engine_check("load.hashes")
def hashes(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare published hashes with hashes recomputed from the prompts."""
    compared = _compared(engine)
    if not compared or not engine.event_counts.stored:
        return
    residency = engine.residency
    if residency is None or residency.scheme is None:
        yield error(
            "no hash of a block could be recomputed from its tokens",
            "the hash function is not vLLM's, its seed is random, or the hashes are wrong",
            "set PYTHONHASHSEED for the engine (and models.NAME.hash_seeds); see cache.scheme",
        )
        return
    count = 0
    for one, _ in compared:
        if one.stored is None:
            continue
        count += one.stored.hashes
        if one.stored.hash_differs_at is not None:
            yield error(
                f"{one.kind}: the hash of the block that ends at token {one.stored.hash_differs_at} does not "
                "match its tokens",
                "the engine hashes something that its events do not carry, or publishes wrong hashes",
                _REPORT,
            )
            return
    if count:
        yield ok(f"{count} published hashes equal those of the prompts' blocks")


@engine_check("load.phantoms")
def phantoms(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that every block held according to events is held by the engine."""
    compared = _compared(engine)
    found = [one for one, how in compared if how == "phantom"]
    if found:
        yield error(
            f"{len(found)} of {len(compared)} prompts: blocks held according to events were computed again; "
            f"{_shown(found[0])}",
            "a removal was not published, or a store of a block that the engine does not keep",
            _REPORT,
        )
        return
    held = [one for one, how in compared if how == "exact" and one.request.predicted]
    if held:
        yield ok(f"all {len(held)} prompts with blocks held according to events were hits")


@engine_check("load.hits")
def hits(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare predicted with real hits; phantoms have a separate check."""
    compared = _compared(engine)
    if not compared:
        return
    wrong = [(one, how) for one, how in compared if how in {"over", "under"}]
    unpredicted = [one for one, how in compared if how == "unpredicted"]
    exact = [one for one, how in compared if how == "exact"]
    if wrong:
        one, how = wrong[0]
        yield error(
            f"{len(wrong)} of {len(compared)} predictions wrong; {how}, {_shown(one)}",
            "the engine holds blocks that were not published"
            if how == "under"
            else "a fact that no event carries is missing: the drafter's dropped block or the Mamba mode",
            _REPORT if how == "under" else "see cache.facts; set models.NAME.eagle_groups",
        )
    if unpredicted:
        yield error(
            f"no hit could be predicted of {len(unpredicted)} of {len(compared)} requests: "
            f"{unpredicted[0].request.why_unknown}",
            "no events, or a fact that no event carries is missing",
            "see http.event_sources, events.flow and cache.facts",
        )
    reused = sum(bool(actual(one)) for one in exact)
    if exact and not reused:
        yield error(
            f"{len(exact)} predictions exact, but nothing was reused",
            "prefix caching is off, or blocks are larger than the prompts",
            "see cache.prefix_caching and cache.groups",
        )
    elif exact and not wrong and not unpredicted:
        yield ok(f"all {len(exact)} predictions exact, {reused} of them hits")


@engine_check("load.usage")
def usage(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Compare ``cached_tokens`` with the stored blocks and the engine's own counters."""
    load = engine.load
    answered = [one for one, _ in _compared(engine)]
    reporting = [one for one in answered if one.request.cached is not None]
    if load is None or not reporting:
        return
    false = [one for one in reporting if _untrue(one)]
    if false:
        yield error(
            f"{len(false)} of {len(reporting)} responses with wrong cached_tokens; {_shown(false[0])}",
            "the report does not belong to this request's lookup",
            _REPORT,
        )
        return
    witnessed = sum(_witnessed(one) for one in reporting)
    counted = _counted(load)
    total = load.uncompared_cached_tokens + sum(one.request.cached or 0 for one in reporting)
    if counted is not None and len(reporting) == len(answered) and not _foreign(load) and counted != total:
        yield error(
            f"responses reported {total} cached tokens, the engine's counters {counted}",
            "the report does not belong to this request's lookup, or there were other requests",
            _REPORT,
        )
    elif witnessed:
        yield ok(
            f"{witnessed} reports of cached tokens agree with the blocks stored, {total} tokens in total"
        )
    else:
        yield info(
            f"{len(reporting)} reports of cached tokens, none of them compared with stored blocks",
            "no full-attention group, or no events",
        )


def _foreign(load: LoadEvidence) -> int:
    """Return the number of requests of other clients, by the engine's counter."""
    return max(0, load.after.requests - load.before.requests - load.sent)


def _counted(load: LoadEvidence) -> int | None:
    before, after = load.before.hit_tokens, load.after.hit_tokens
    return None if before is None or after is None else after - before
