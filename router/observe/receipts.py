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

from collections import deque
from typing import Any, Final, Literal

import msgspec

from kvatlas.publisher.events import MEDIA
from kvatlas.router.observe.cache_worth import CacheWorth
from kvatlas.router.observe.histogram import Histogram

GPU, CPU, STORAGE = MEDIA
WINDOW = 100
# One in four wrong over the window. Load alone makes about one in ten wrong in the demo: a prompt's hit is
# decided when the engine reaches it, not when it is placed.
DRIFT_SHARE = 0.25
DRIFT_MIN = 20
EVIDENCE_KEPT = 4
# Consecutive reports without cached tokens that show that an engine never tells them, and where it once did.
UNDETAILED_MIN, UNDETAILED_AFTER_MIN = 3, 50
# Upper bounds of (predicted - actual) in tokens; the bucket "0" beyond "-1" holds the exact ones.
ERROR_BUCKETS = (-8192, -1024, -256, -64, -1, 0, 64, 256, 1024, 8192)

Leg = Literal["", "prefill", "decode"]
# Outcomes of predictions that can be compared with the engine's report.
COMPARED = ("exact", "over", "under")
# Why a prompt went to another engine than the one that holds most of it: its queue was longer; it lacked
# free KV cache pages; other parts of the cost; or it was predicted to miss the service level.
Missed = Literal["", "load", "pages", "choice", "slo"]
Outcome = Literal["exact", "over", "under", "unreported", "unpredicted"]


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """One request on one engine; tokens.

    ``predicted_tokens`` is the whole hit; ``cpu_tokens`` and ``storage_tokens`` are its parts that would be
    loaded, the rest is on the GPU. ``actual_tokens`` is the engine's ``cached_tokens``, which includes both.

    ``mode``: where the prediction came from; ``fallback``: there was none, because the index shared with
    other replicas did not answer in time.

    It is kept as a tuple (``KeptReceipt``), and made when someone asks.
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
    actual_tokens: int | None = None
    reported_prompt_tokens: int | None = None
    pulled_tokens: int = 0
    """Part of ``predicted_tokens`` that the engine was to pull from another one's host memory."""
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
    shared_prefix_tokens: int = 0
    evicted_tokens: int = 0
    """Tokens present or in transit when the request was sent, but expected to be evicted for prompts ahead of
    it; not part of ``predicted_tokens``."""
    api: str = ""
    """API of the request: chat, completions, messages, responses, ..."""
    read: str = ""
    """Tokenizer of the prompt: ``local`` or ``engine``."""
    reason: str = ""
    ttft_s: float | None = None
    """Measured seconds from asking the engine to the first token of a stream."""
    predicted_ttft_s: float | None = None
    """Its prediction: the sum of the next five. None if no hit was predicted."""
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
    index_problem: str = ""
    """Why the index shared with other replicas could not be used; "" if it answered, or if there is none."""
    pulled_from: str = ""
    """Engine that ``pulled_tokens`` were to come from."""
    came_tokens: int | None = None
    """Tokens of it that came by the engine's report; None without a report."""
    pull_s: float = 0.0
    """Predicted seconds of the transfer, with its wait for the link; a part of ``load_s``."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the prediction; unreported if the engine reported no ``cached_tokens``."""
        return outcome_of(self.predicted_tokens, self.actual_tokens)

    @property
    def by_medium(self) -> dict[str, int]:
        """Predicted tokens by medium; empty without a prediction."""
        if self.predicted_tokens is None:
            return {}
        gpu = self.predicted_tokens - self.cpu_tokens - self.storage_tokens
        return {GPU: gpu, CPU: self.cpu_tokens, STORAGE: self.storage_tokens}


KeptReceipt = tuple[Any, ...]
"""The fields of a ``Receipt``, in their order."""
FUNNEL_FIELDS: Final = slice(12, 19)
"""Those from ``tenant`` to ``salted``."""


def outcome_of(predicted: int | None, actual: int | None) -> Outcome:
    """Return the outcome of a prediction, in tokens."""
    if predicted is None:
        return "unpredicted"
    if actual is None:
        return "unreported"
    if predicted == actual:
        return "exact"
    return "over" if predicted > actual else "under"


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose engine reported other cached tokens than its own events imply."""

    request_id: str
    kind: Literal["more", "fewer", "impossible"]
    """``impossible``: more cached tokens than the prompt has."""
    predicted_tokens: int
    reported_tokens: int
    prompt_tokens: int | None


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
    errors: Histogram = msgspec.field(default_factory=lambda: Histogram(ERROR_BUCKETS))
    """Predicted - actual."""
    window: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    store_window: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Latest predictions with tokens from a store: whether they came."""
    contradictions: dict[str, int] = msgspec.field(default_factory=dict)
    """Receipts in which engine and index cannot both be right, by kind."""
    checked: deque[str] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Latest receipts that can contradict the engine: the kind, or ""."""
    evidence: deque[Contradiction] = msgspec.field(default_factory=lambda: deque(maxlen=EVIDENCE_KEPT))
    worth: CacheWorth = msgspec.field(default_factory=CacheWorth)

    def add(self, kept: KeptReceipt) -> None:
        """Count one receipt of this engine."""
        actual: int | None
        request_id, _, _, mode, feed, prompt, predicted, cpu, storage, actual, reported, pulled = kept[:12]
        # It says more of another engine's cache and of the link (``PullStats``).
        if pulled:
            return
        outcome = outcome_of(predicted, actual)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        same_length = reported is None or reported == prompt
        self.prompt_mismatches += not same_length
        if actual is not None:
            self.undetailed = 0
        elif reported is not None:
            self.undetailed += 1
        if predicted is None or actual is None:
            return
        error = predicted - actual
        self.predicted_tokens += predicted
        self.actual_tokens += actual
        self.prompt_tokens += prompt or 0
        self.abs_error_tokens += abs(error)
        self.errors.observe(error)
        key = STORAGE if storage else CPU if cpu else GPU, outcome
        self.by_medium[key] = self.by_medium.get(key, 0) + 1
        by_medium = self.predicted_by_medium
        if on_gpu := predicted - cpu - storage:
            by_medium[GPU] = by_medium.get(GPU, 0) + on_gpu
        if cpu:
            by_medium[CPU] = by_medium.get(CPU, 0) + cpu
        if storage:
            by_medium[STORAGE] = by_medium.get(STORAGE, 0) + storage
            self.store_window.append(error <= 0)
        # Errors of the others are no drift of the index.
        if not storage and mode not in {"pending", "partial"}:
            self.window.append(error == 0)
        # A report contradicts the engine's events only if the index was complete: exact hashes, a feed
        # without gaps, the same prompt length, and no tokens from a store, whose evictions are not reported.
        kind: Literal["", "more", "fewer", "impossible"]
        if reported is not None and actual > reported:
            kind = "impossible"
        elif mode == "native" and feed == "ready" and not storage and same_length:
            kind = "" if error == 0 else "more" if error < 0 else "fewer"
        else:
            return
        self.checked.append(kind)
        if kind:
            self.contradictions[kind] = self.contradictions.get(kind, 0) + 1
            self.evidence.append(
                Contradiction(
                    request_id=request_id,
                    kind=kind,
                    predicted_tokens=predicted,
                    reported_tokens=actual,
                    prompt_tokens=reported or prompt,
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
    def store_misses(self) -> int:
        """How many of the latest predictions from a store were too high, if they are too many; else 0."""
        missed, count = self.store_window.count(False), len(self.store_window)
        return missed if count >= DRIFT_MIN and missed > DRIFT_SHARE * count else 0

    @property
    def drifting(self) -> bool:
        """Whether predictions for this engine are wrong too often to be trusted."""
        return len(self.window) >= DRIFT_MIN and self.wrong_share > DRIFT_SHARE
