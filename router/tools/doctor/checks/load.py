"""Checks of a small generated load (``kvatlas certify``): every request by four witnesses.

What was predicted from events, what the engine reported (``cached_tokens``), from where on it stored what it
computed, and what its own counters on ``/metrics`` say. Where they disagree, the odd one out names the fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from router.tools.doctor.evidence import EngineEvidence, LoadEvidence, LoadRequest
from router.tools.doctor.findings import CheckResult, error, info, ok, warning
from router.tools.doctor.gather.observation import ReplayState
from router.tools.doctor.registry import engine_check

Outcome = Literal["exact", "phantom", "over", "under", "unpredicted", "unknown"]
_REPORT = "report it to the maintainers of the engine, with the output of --json"


def actual(one: LoadRequest) -> int | None:
    """The real hit: by the blocks stored where that shows it, else as reported."""
    cached, stored = one.request.cached, one.stored
    if stored is not None and stored.computed_from is not None:
        return cached if cached is not None and stored.begins(cached) else stored.computed_from
    return cached


def outcome(one: LoadRequest, alignment: int) -> Outcome:
    """How the prediction compares with the real hit. ``phantom``: blocks that its events say are held were
    computed again, and more than the last unit, which a drafter's look-up drops."""
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
    if any(_untrue(one) for one in answered):  # then a report alone shows nothing
        compared = [(one, how if _witnessed(one) else "unknown") for one, how in compared]
    if any(how == "phantom" for _, how in compared):  # then a single unit is one too, no drafter's
        compared = [(one, "phantom" if how == "over" and _witnessed(one) else how) for one, how in compared]
    return compared


def _witnessed(one: LoadRequest) -> bool:
    return one.stored is not None and one.stored.computed_from is not None


def _untrue(one: LoadRequest) -> bool:
    cached = one.request.cached
    return cached is not None and one.stored is not None and not one.stored.begins(cached)


def _shown(one: LoadRequest) -> str:
    request, stored = one.request, one.stored
    told = f"{one.kind}: predicted {request.predicted}, reported {request.cached}"
    if stored is not None and stored.computed_from is not None:
        told += f", stored from token {stored.computed_from} on"
    return f"{told}, of {request.reported_prompt_tokens or request.prompt_tokens} tokens"


@engine_check("load.answers")
def answers(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Whether all requests were answered."""
    load = engine.load
    if load is None:
        return
    failed = [one for one in load.requests if one.request.status]
    if load.problem:
        yield error(f"the load broke off: {load.problem}", "an answer of another shape", _REPORT)
    for one in failed[:1]:
        yield error(
            f"{one.kind}: {one.request.status}",
            "the engine does not answer this kind of request, or ended",
            "look at the engine's log",
        )
    if load.requests and not failed and not load.problem:
        late = "; the time was over before all were sent" if load.out_of_time else ""
        yield ok(f"{load.sent} requests answered{late}")


@engine_check("load.idle")
def idle(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Other requests evict blocks and are counted too."""
    load = engine.load
    if load is None or not load.after.requests:
        return
    if foreign := _foreign(load):
        yield warning(
            f"{foreign} requests that are not ours ended at the engine meanwhile",
            "somebody else uses the engine",
            "take it out of service while it is certified",
        )


@engine_check("load.replay")
def replay(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Whether the replay socket gives what was published."""
    again = None if engine.load is None else engine.load.replay
    if again is None:
        return
    if again.state is not ReplayState.COMPLETE:
        yield error(
            f"the replay socket did not answer whole ({again.state})",
            "the engine answers the first request for history only, or its send queue overflowed",
            "look at the engine's log; a large buffer_steps needs a large hwm",
        )
    elif again.missing or again.different:
        yield error(
            f"of {again.heard} batches heard live {again.missing} are missing in replay, "
            f"{again.different} are others",
            "the buffer drops or rewrites batches",
            _REPORT,
        )
    elif again.heard:
        yield ok(f"replay gives all {again.heard} batches that were heard")


@engine_check("load.tokens")
def tokens(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Tokens of prompts, against those of the events and the lengths reported."""
    compared = _compared(engine)
    for one, _ in compared:
        ours, theirs = one.request.prompt_tokens, one.request.reported_prompt_tokens
        differs = None if one.stored is None else one.stored.token_differs_at
        if differs is not None or one.request.lengths_differ:
            where = f"its events differ from token {differs} on" if differs is not None else "in length"
            yield error(
                f"{one.kind}: {ours} tokens here, {theirs} at the engine; {where}",
                "another tokenizer or chat template, or events that carry other tokens than were computed",
                "see tokens.parity; give the tokenizer directory that the engine loaded",
            )
            return
    matched = sum(_witnessed(one) for one, _ in compared)
    if matched:
        yield ok(f"tokens in the events of {matched} prompts are those computed here")


@engine_check("load.hashes")
def hashes(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Hashes published, against hashes recomputed of the prompts."""
    compared = _compared(engine)
    if not compared or not engine.tally.stored:
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
                f"{one.kind}: the hash of the block that ends at token {one.stored.hash_differs_at} is not "
                "that of its tokens",
                "the engine hashes something that its events do not carry, or publishes wrong hashes",
                _REPORT,
            )
            return
    if count:
        yield ok(f"{count} published hashes are those of the prompts' blocks")


@engine_check("load.phantoms")
def phantoms(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Blocks that are held by the events, and not by the engine."""
    compared = _compared(engine)
    found = [one for one, how in compared if how == "phantom"]
    if found:
        yield error(
            f"{len(found)} of {len(compared)} prompts: blocks held by the events were computed again; "
            f"{_shown(found[0])}",
            "a removal was not published, or a store of a block that the engine does not keep",
            _REPORT,
        )
        return
    held = [one for one, how in compared if how == "exact" and one.request.predicted]
    if held:
        yield ok(f"all {len(held)} prompts with blocks held by the events were hits")


@engine_check("load.hits")
def hits(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Predicted against real hits; phantoms have a check of their own."""
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
            "the engine holds blocks that no event announced"
            if how == "under"
            else "a fact that no event carries is missing: a drafter's dropped block, a Mamba mode",
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
            f"{len(exact)} predictions exact, and nothing was reused",
            "prefix caching is off, or blocks are larger than the prompts",
            "see cache.prefix_caching and cache.groups",
        )
    elif exact and not wrong and not unpredicted:
        yield ok(f"all {len(exact)} predictions exact, {reused} of them hits")


@engine_check("load.usage")
def usage(engine: EngineEvidence) -> Iterator[CheckResult]:
    """``cached_tokens``, against the blocks stored and the engine's own counters."""
    load = engine.load
    answered = [one for one, _ in _compared(engine)]
    told = [one for one in answered if one.request.cached is not None]
    if load is None or not told:
        return
    false = [one for one in told if _untrue(one)]
    if false:
        yield error(
            f"{len(false)} of {len(told)} answers with untrue cached_tokens; {_shown(false[0])}",
            "the report is not of this request's look-up",
            _REPORT,
        )
        return
    witnessed = sum(_witnessed(one) for one in told)
    counted = _counted(load)
    total = load.uncompared_cached_tokens + sum(one.request.cached or 0 for one in told)
    if counted is not None and len(told) == len(answered) and not _foreign(load) and counted != total:
        yield error(
            f"answers reported {total} cached tokens, the engine's counters {counted}",
            "the report is not of this request's look-up, or other requests came",
            _REPORT,
        )
    elif witnessed:
        yield ok(f"{witnessed} reports of cached tokens agree with the blocks stored, {total} tokens in all")
    else:
        yield info(
            f"{len(told)} reports of cached tokens, none compared with blocks stored",
            "no full-attention group, or no events",
        )


def _foreign(load: LoadEvidence) -> int:
    """Requests of others, by the engine's counter."""
    return max(0, load.after.requests - load.before.requests - load.sent)


def _counted(load: LoadEvidence) -> int | None:
    before, after = load.before.hit_tokens, load.after.hit_tokens
    return None if before is None or after is None else after - before
