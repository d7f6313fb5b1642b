"""Receipts: the prediction for a request, and the engine's report.

Per engine ``EngineReceipts`` counts exact, over and under predictions, sums the tokens, keeps a histogram of
the error and a window of the last ``WINDOW`` outcomes: an engine whose wrong share in it exceeds
``DRIFT_SHARE`` is flagged as drifting. An engine reports one number for tokens from its GPU and loaded ones
together, so that sum is compared; outcomes are also kept by the farthest medium that a prediction used. Those
that used storage do not enter the window, because evictions of a store are not reported; nor do those that
relied on the order of prompts in the engine (mode ``pending``). The latest receipts
are kept for inspection. First tokens are compared too. ``CacheFunnel`` sums up by model and tenant how much
of the prompts was held anywhere, held by the chosen engine, and delivered, and why the rest was missed. Pure
and bounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Annotated, Literal

import msgspec

from kvatlas.publisher.events import MEDIA

# A histogram that is cheap to update: a list of counts, evaluated when scraped.


class Histogram:
    """``bounds`` are ascending upper bounds; one more count is for values above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound as text, values up to it), as Prometheus expects."""
        found, running = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            found.append((str(bound), float(running)))
        return found


# Time to first token: the prediction part by part, and the errors of one engine's predictions.
#
# A prediction is accurate if the measured time differs from it by at most ``HOLDS_S`` or ``HOLDS_SHARE`` of
# the prediction, whichever is more. Errors are measured minus predicted seconds: above 0 the token came late.
# Pure and bounded: at most ``MODELS_MAX`` histograms and ``WINDOW`` errors per engine.


# Several scheduler steps of an engine, which cannot be known from outside.
HOLDS_S = 0.05
HOLDS_SHARE = 0.1
WINDOW = 100
# Quantile of the errors: a first token comes later than prediction and margin in one request of twenty.
MARGIN_QUANTILE = 0.95
MODELS_MAX = 16
# The model label of an engine's further models (LoRA adapters).
OTHER = "other"
# A smaller share of accurate predictions, of at least this number, is a problem of the engine.
ACCURATE_SHARE_MIN, ACCURATE_OF_MIN = 0.5, 20
# Errors between two computations of the margin: sorting the window takes 4 us.
_REFRESH_EVERY = 8
_ERRORS_S = (-30.0, -10.0, -2.5, -1.0, -0.25, -0.05, -0.01, 0.01, 0.05, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0)


class FirstTokenParts(msgspec.Struct, frozen=True, gc=False):
    """Predicted seconds from the moment the engine is asked until its first token."""

    queue_s: float
    """Prefill work queued before it."""
    pages_s: float
    """Further wait until the pool has pages for the prompt."""
    load_s: float
    """Loading from memory outside the GPU."""
    prefill_s: float
    """Computing the uncached tokens."""
    engine_s: float
    """The engine's own overhead per request, and the delay by its running requests."""

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return self.queue_s + self.pages_s + self.load_s + self.prefill_s + self.engine_s


class FirstTokenSummary(msgspec.Struct, kw_only=True):
    """An engine's latest first tokens, predicted and measured: medians over the window, seconds."""

    accurate: int = 0
    """Accurate predictions of the window."""
    compared: int = 0
    """Length of the window."""
    predicted_s: float | None = None
    measured_s: float | None = None
    margin_s: float | None = None
    """Seconds on top of a prediction within which the first token comes in 95 of 100 requests."""


class SloStats(msgspec.Struct):
    """Counters of requests with a service level."""

    met: Annotated[dict[str, int], "kvatlas_slo_met_total{priority}"] = msgspec.field(default_factory=dict)
    """Streams whose first token came within the target of their service level, by class."""
    missed: Annotated[dict[str, int], "kvatlas_slo_missed_total{priority}"] = msgspec.field(
        default_factory=dict
    )
    """Streams whose first token came after the target of their service level, by class."""
    decisions: Annotated[int, "kvatlas_slo_decisions_total"] = 0
    """Decisions on requests with a service level; a request that waited in the queue is decided twice."""
    hopeless: Annotated[int, "kvatlas_slo_hopeless_total"] = 0
    """Of these, those for which every engine was predicted to miss the target, so that the cost decided."""
    engines_skipped: Annotated[int, "kvatlas_slo_engines_skipped_total"] = 0
    """Engines left out of decisions, because the cheapest one was predicted to miss the target and others
    were not; not counted in fleets with prefill engines."""


class FirstTokenErrors:
    """Predictions of one engine compared with measured first tokens."""

    __slots__ = ("_latest", "_margin_s", "_refresh_in", "accurate", "by_model", "outcomes")

    def __init__(self) -> None:
        self.by_model: dict[str, Histogram] = {}
        """Errors in seconds."""
        self.outcomes = {"accurate": 0, "late": 0, "early": 0}
        self.accurate = 0
        """Accurate predictions of the window."""
        self._latest: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._margin_s: float | None = None
        self._refresh_in = 0

    def add(self, model: str, predicted_s: float, measured_s: float) -> None:
        """Count one first token."""
        error_s = measured_s - predicted_s
        histogram = self.by_model.get(model)
        if histogram is None:
            name = model if len(self.by_model) < MODELS_MAX else OTHER
            histogram = self.by_model.setdefault(name, Histogram(_ERRORS_S))
        histogram.observe(error_s)
        outcome = _outcome(predicted_s, error_s)
        self.outcomes[outcome] += 1
        if len(self._latest) == WINDOW:
            before_s, real_s = self._latest[0]
            self.accurate -= _outcome(before_s, real_s - before_s) == "accurate"
        self.accurate += outcome == "accurate"
        self._latest.append((predicted_s, measured_s))
        self._refresh_in -= 1

    @property
    def compared(self) -> int:
        """Length of the window."""
        return len(self._latest)

    @property
    def margin_s(self) -> float | None:
        """The error that ``MARGIN_QUANTILE`` of the window stay below, at least 0; None without errors."""
        if self._refresh_in <= 0 and self._latest:
            errors = sorted([measured - predicted for predicted, measured in self._latest])
            self._margin_s = max(0.0, errors[int(MARGIN_QUANTILE * (len(errors) - 1))])
            self._refresh_in = _REFRESH_EVERY
        return self._margin_s

    def summary(self) -> FirstTokenSummary:
        """Summarize the window."""
        if not self._latest:
            return FirstTokenSummary()
        return FirstTokenSummary(
            accurate=self.accurate,
            compared=len(self._latest),
            predicted_s=median([predicted for predicted, _ in self._latest]),
            measured_s=median([measured for _, measured in self._latest]),
            margin_s=self.margin_s,
        )


def _outcome(predicted_s: float, error_s: float) -> str:
    allowed_s = max(HOLDS_S, HOLDS_SHARE * predicted_s)
    return "late" if error_s > allowed_s else "early" if error_s < -allowed_s else "accurate"


GPU, CPU, STORAGE = MEDIA
# One in four wrong over the window. Load alone makes about one in ten wrong in the demo: a prompt's hit is
# decided when the engine reaches it, not when it is placed.
DRIFT_SHARE = 0.25
DRIFT_MIN = 20
EVIDENCE_KEPT = 4
# Found by request id; pages show the latest few.
RECEIPTS_KEPT = 4096
# Consecutive reports without cached tokens that show that an engine never tells them, and where it once did.
UNDETAILED_MIN, UNDETAILED_AFTER_MIN = 3, 50
# Pairs of model and tenant with separate counts.
FUNNELS_MAX = 1024
# Upper bounds of (predicted - actual) in tokens; the bucket "0" beyond "-1" holds the exact ones.
ERROR_BUCKETS = (-8192, -1024, -256, -64, -1, 0, 64, 256, 1024, 8192)

Leg = Literal["", "prefill", "decode"]
# Outcomes of predictions that can be compared with the engine's report.
COMPARED = ("exact", "over", "under")
# Why a prompt went to another engine than the one that holds most of it: its queue was longer; it lacked
# free KV cache pages; other parts of the cost; or it was predicted to miss the service level.
Missed = Literal["", "load", "pages", "choice", "slo"]
Outcome = Literal["exact", "over", "under", "unreported", "unpredicted"]


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request on one engine; tokens.

    ``predicted_tokens`` is the whole hit; ``cpu_tokens`` and ``storage_tokens`` are its parts that would be
    loaded, the rest is on the GPU. ``actual_tokens`` is the engine's ``cached_tokens``, which includes both.

    ``mode``: where the prediction came from; ``fallback``: there was none, because the index shared with
    other replicas did not answer in time.
    """

    request_id: str
    engine_id: str
    model: str
    mode: str
    feed: str
    prompt_tokens: int | None
    predicted_tokens: int | None
    cpu_tokens: int = 0
    storage_tokens: int = 0
    shared_prefix_tokens: int = 0
    evicted_tokens: int = 0
    """Tokens present or in transit when the request was sent, but expected to be evicted for prompts ahead of
    it; not part of ``predicted_tokens``."""
    actual_tokens: int | None = None
    reported_prompt_tokens: int | None = None
    api: str = ""
    """API of the request: chat, completions, messages, responses, ..."""
    read: str = ""
    """Tokenizer of the prompt: ``local`` or ``engine``."""
    reason: str = ""
    ttft_s: float | None = None
    """Measured seconds from asking the engine to the first token of a stream."""
    predicted_ttft_s: float | None = None
    """Its prediction: the sum of the five parts below. None if no hit was predicted."""
    queue_s: float = 0.0
    pages_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    engine_s: float = 0.0
    router_s: float = 0.0
    """The router's own seconds: from the request's last byte until this engine was asked, without
    ``waited_s``; earlier attempts are included."""
    leg: Leg = ""
    """``prefill``: it computed the prompt for another engine; ``decode``: it fetched blocks that another one
    had computed, and ``actual_tokens`` is the other one's hit; "": it did both."""
    gap_s: float | None = None
    """Of a decode leg: seconds between the answer of the prefill engine and this request."""
    slo_ttft_s: float | None = None
    """Target for the time to first token, from the request's last byte; None without a service level."""
    waited_s: float = 0.0
    """Seconds that the request waited in the router before an engine was asked."""
    tenant: str = ""
    held_tokens: int = 0
    """Most tokens of the prompt that any eligible engine had in its caches."""
    missed: Missed = ""
    """Why the request did not go to that engine."""
    elsewhere_s: float = 0.0
    """Seconds to compute the tokens that are held there."""
    seen_tokens: int = 0
    """Longest prefix known from earlier prompts (one in four is kept, at powers of two) if it is longer than
    the hit; else 0."""
    isolated_tokens: int = 0
    """Prompt tokens that no cache held for its isolation group, and that another group sent before."""
    salted: bool = False
    """Whether it has a cache salt."""
    pulled_tokens: int = 0
    """Part of ``predicted_tokens`` that the engine was to pull from another one's host memory."""
    pulled_from: str = ""
    """That engine."""
    came_tokens: int | None = None
    """Tokens of it that came by the engine's report; None without a report."""
    pull_s: float = 0.0
    """Predicted seconds of the transfer, with its wait for the link; a part of ``load_s``."""
    index_problem: str = ""
    """Why the index shared with other replicas could not be used; "" if it answered, or if there is none."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the prediction; unreported if the engine reported no ``cached_tokens``."""
        if self.predicted_tokens is None:
            return "unpredicted"
        if self.actual_tokens is None:
            return "unreported"
        if self.predicted_tokens == self.actual_tokens:
            return "exact"
        return "over" if self.predicted_tokens > self.actual_tokens else "under"

    @property
    def by_medium(self) -> dict[str, int]:
        """Predicted tokens by medium; empty without a prediction."""
        if self.predicted_tokens is None:
            return {}
        gpu = self.predicted_tokens - self.cpu_tokens - self.storage_tokens
        return {GPU: gpu, CPU: self.cpu_tokens, STORAGE: self.storage_tokens}


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose engine reported other cached tokens than its own events imply."""

    request_id: str
    kind: Literal["more", "fewer", "impossible"]
    """``impossible``: more cached tokens than the prompt has."""
    predicted_tokens: int
    reported_tokens: int
    prompt_tokens: int | None


# Equal to that of hot prefixes: the order of engines for scale-down should outlast the pauses of a session.
WORTH_HALF_LIFE_S = 600.0


class CacheWorth(msgspec.Struct):
    """Prefill work that one engine's cache alone can save, as a decaying sum.

    Every prompt adds the seconds by which its hit there is longer than on any other eligible engine,
    whichever engine was chosen: the work that the fleet would repeat if this cache were lost.
    """

    seconds: float = 0.0
    at_s: float = 0.0
    """Monotonic time of ``seconds``."""

    def add(self, seconds: float, now: float) -> None:
        """Count one prompt."""
        self.seconds = self.seconds * math.exp2((self.at_s - now) / WORTH_HALF_LIFE_S) + seconds
        self.at_s = now

    def per_minute(self, now: float) -> float:
        """Seconds of prefill per minute.

        A steady rate r per second gives a sum of r * half-life / ln 2.
        """
        decayed = self.seconds * math.exp2((self.at_s - now) / WORTH_HALF_LIFE_S)
        return decayed * 60.0 * math.log(2.0) / WORTH_HALF_LIFE_S


class EngineReceipts(msgspec.Struct):
    """Sums over one engine's receipts."""

    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    by_medium: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """(farthest medium, outcome) -> compared receipts."""
    predicted_by_medium: dict[str, int] = msgspec.field(default_factory=dict)
    """Predicted tokens of compared receipts."""
    predicted_tokens: int = 0
    actual_tokens: int = 0
    prompt_tokens: int = 0
    abs_error_tokens: int = 0
    prompt_mismatches: int = 0
    """Prompts with another length at the engine than here: tokenizer or chat template differ."""
    undetailed: int = 0
    """Latest consecutive reports of usage that say nothing of cached tokens."""
    errors: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ERROR_BUCKETS) + 1))
    """Histogram of predicted - actual; bucket i ends at ``ERROR_BUCKETS[i]``, the last one is open."""
    window: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    contradictions: dict[str, int] = msgspec.field(default_factory=dict)
    """Receipts in which engine and index cannot both be right, by kind."""
    checked: deque[str] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Latest receipts that can contradict the engine: the kind, or ""."""
    evidence: deque[Contradiction] = msgspec.field(default_factory=lambda: deque(maxlen=EVIDENCE_KEPT))
    first_tokens: FirstTokenErrors = msgspec.field(default_factory=FirstTokenErrors)
    worth: CacheWorth = msgspec.field(default_factory=CacheWorth)

    def add(self, receipt: Receipt) -> None:
        """Count one receipt of this engine."""
        # It says more of another engine's cache and of the link (``PullStats``).
        if receipt.pulled_tokens:
            return
        outcome, reported = receipt.outcome, receipt.reported_prompt_tokens
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if reported is not None and reported != receipt.prompt_tokens:
            self.prompt_mismatches += 1
        if receipt.actual_tokens is not None:
            self.undetailed = 0
        elif reported is not None:
            self.undetailed += 1
        if receipt.predicted_ttft_s is not None and receipt.ttft_s is not None:
            self.first_tokens.add(receipt.model, receipt.predicted_ttft_s, receipt.ttft_s)
        predicted, actual = receipt.predicted_tokens, receipt.actual_tokens
        if predicted is None or actual is None:
            return
        error = predicted - actual
        self.predicted_tokens += predicted
        self.actual_tokens += actual
        self.prompt_tokens += receipt.prompt_tokens or 0
        self.abs_error_tokens += abs(error)
        self.errors[bisect_left(ERROR_BUCKETS, error)] += 1
        cpu, storage = receipt.cpu_tokens, receipt.storage_tokens
        key = STORAGE if storage else CPU if cpu else GPU, outcome
        self.by_medium[key] = self.by_medium.get(key, 0) + 1
        if predicted:
            for medium, tokens in receipt.by_medium.items():
                if tokens:
                    self.predicted_by_medium[medium] = self.predicted_by_medium.get(medium, 0) + tokens
        # Errors of the others are no drift of the index.
        if not storage and receipt.mode not in {"pending", "partial"}:
            self.window.append(error == 0)
        self._check(receipt, predicted, actual)

    def _check(self, receipt: Receipt, predicted: int, actual: int) -> None:
        """Check the report, only if the index was complete: exact hashes, a feed without gaps, the same
        prompt length, and no tokens from a store, whose evictions are not reported."""
        reported = receipt.reported_prompt_tokens
        impossible = reported is not None and actual > reported
        complete = receipt.mode == "native" and receipt.feed == "ready" and not receipt.storage_tokens
        if not impossible and (not complete or reported not in {None, receipt.prompt_tokens}):
            return
        if not impossible and predicted == actual:
            self.checked.append("")
            return
        kind: Literal["more", "fewer", "impossible"] = "more" if actual > predicted else "fewer"
        kind = "impossible" if impossible else kind
        self.checked.append(kind)
        self.contradictions[kind] = self.contradictions.get(kind, 0) + 1
        self.evidence.append(
            Contradiction(
                request_id=receipt.request_id,
                kind=kind,
                predicted_tokens=predicted,
                reported_tokens=actual,
                prompt_tokens=reported or receipt.prompt_tokens,
            )
        )

    @property
    def contradicting(self) -> list[Contradiction]:
        """Latest evidence that its reported cached tokens cannot be trusted; empty if they can. One
        impossible report is enough; others differ occasionally under load alone, so those need a share."""
        wrong = sum(kind != "" for kind in self.checked)
        many = len(self.checked) >= DRIFT_MIN and wrong > DRIFT_SHARE * len(self.checked)
        return list(self.evidence) if many or "impossible" in self.checked else []

    @property
    def tells_no_hits(self) -> bool:
        """Whether the engine reports usage without cached tokens (old releases leave out a hit of 0)."""
        told = any(outcome in self.outcomes for outcome in COMPARED)
        return self.undetailed >= (UNDETAILED_AFTER_MIN if told else UNDETAILED_MIN)

    @property
    def wrong_share(self) -> float:
        """Share of wrong predictions among the latest compared ones (without those from storage)."""
        return 1 - sum(self.window) / len(self.window) if self.window else 0.0

    @property
    def drifting(self) -> bool:
        """Whether predictions for this engine are wrong too often to be trusted."""
        return len(self.window) >= DRIFT_MIN and self.wrong_share > DRIFT_SHARE


class FunnelCounts(msgspec.Struct):
    """Prompt tokens of requests whose hit was predicted and reported, stage by stage."""

    prompt: int = 0
    held: int = 0
    """Held by the engine that holds most of each prompt."""
    chosen: int = 0
    """Held by the chosen engine."""
    delivered: int = 0
    """Reported by engines."""
    missed: dict[str, int] = msgspec.field(default_factory=dict)
    elsewhere_s: float = 0.0


class CacheFunnel:
    """Counts by model and tenant."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], FunnelCounts] = {}

    def add(self, receipt: Receipt) -> None:
        """Count one receipt, if its hit was predicted and reported."""
        chosen, delivered, prompt = receipt.predicted_tokens, receipt.actual_tokens, receipt.prompt_tokens
        if chosen is None or delivered is None or prompt is None:
            return
        held = receipt.held_tokens if receipt.held_tokens > chosen else chosen  # noqa: FURB136
        held = prompt if prompt < held else held  # noqa: FURB136
        counts = self.counts.get((receipt.model, receipt.tenant)) or self._of(receipt.model, receipt.tenant)
        counts.prompt += prompt
        counts.held += held
        counts.chosen += chosen
        counts.delivered += delivered
        missed = counts.missed
        if held < prompt:
            new, seen = prompt - held, receipt.seen_tokens
            if seen > held:
                evicted = min(seen, prompt) - held
                new -= evicted
                missed["evicted"] = missed.get("evicted", 0) + evicted
            if receipt.isolated_tokens:
                isolated = min(receipt.isolated_tokens, new)
                new -= isolated
                missed["isolated"] = missed.get("isolated", 0) + isolated
            why = "salted" if receipt.salted else "new"
            missed[why] = missed.get(why, 0) + new
        if chosen < held:
            why = receipt.missed or "choice"
            missed[why] = missed.get(why, 0) + held - chosen
            counts.elsewhere_s += receipt.elsewhere_s
        if delivered < chosen:
            reported = receipt.reported_prompt_tokens
            why = "lost" if reported is None or reported == prompt else "template"
            missed[why] = missed.get(why, 0) + chosen - delivered

    def _of(self, model: str, tenant: str) -> FunnelCounts:
        key = (model, tenant) if len(self.counts) < FUNNELS_MAX else (OTHER, OTHER)
        return self.counts.setdefault(key, FunnelCounts())


class ReceiptLog:
    """The latest receipts of this router, of all engines."""

    def __init__(self) -> None:
        self.latest: deque[Receipt] = deque(maxlen=RECEIPTS_KEPT)
        self.funnel = CacheFunnel()
        self.listener: Callable[[Receipt], None] | None = None
        """Called with every receipt."""

    def add(self, receipt: Receipt) -> None:
        """Keep one receipt."""
        self.latest.append(receipt)
        self.funnel.add(receipt)
        if self.listener is not None:
            self.listener(receipt)
