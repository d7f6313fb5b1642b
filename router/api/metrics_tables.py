"""The metrics of engines and models, as tables: one column per metric, one row per engine or model."""

from __future__ import annotations

from collections.abc import Mapping

from kvatlas.router.api.metric_families import Column, counter, gauge
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.base import IndexStats
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.observe.receipts import EngineReceipts
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.first_token import FirstTokenErrors
from kvatlas.router.placement.others import OthersLoad, others_at


def engine_columns(now: float, others: Mapping[str, OthersLoad] | None) -> tuple[Column[Engine], ...]:
    """State of every engine. ``others``: in-flight load of siblings and replicas."""
    return (
        gauge("engine_up", "1 if the engine answers GET /v1/models with a model", lambda e: e.up),
        gauge(
            "engine_silent",
            "1 if the engine is down since polls timed out, and for no other reason; requests go to it while "
            "no engine of its model is up",
            lambda e: e.silent,
        ),
        gauge(
            "engine_on_hold",
            "1 if it gets no new requests (drained, not ready, leaving)",
            lambda e: bool(e.held),
        ),
        gauge(
            "engine_breaker_open",
            "1 if the engine gets no requests because its latest ones failed (circuit breaker)",
            lambda e: not e.breaker.allows(now),
        ),
        gauge(
            "engine_kv_usage_ratio",
            "Share of its KV blocks that the engine says running requests use (0 to 1)",
            lambda e: e.kv_usage,
        ),
        counter(
            "engine_transfers_wrong",
            "What the engine's NIXL connector counts of KV transfers that went wrong: failed_transfers, "
            "failed_notifications, kv_expired_reqs (prefills not fetched in time), and "
            "notifications_after_expiry (blocks were read after they had been given up: answers may be "
            "wrong)",
            lambda e: e.transfers or None,
            "kind",
        ),
        gauge(
            "feed_state",
            "1 for the state that the feed of the engine's KV events is in",
            _feed_states,
            "state",
        ),
        gauge(
            "feed_unusable_events",
            "Latest events of the engine in a row that could not be used (rejected, or of unknown types), "
            "where that is all that came or many; 0 where its events can be used",
            lambda e: e.unusable_events if e.publishes_events else None,
        ),
        gauge(
            "queue_ahead_seconds",
            "Prefill work queued at the engine, by the router's account",
            lambda e: e.load.current(now, others_at(e.engine_id, others)).queue_s,
        ),
        gauge(
            "cache_worth_seconds_per_minute",
            "Prefill work per minute of the last minutes that only this engine's cache could save: hits "
            "beyond the longest of any other engine",
            lambda e: e.receipts.worth.per_minute(now),
        ),
        gauge(
            "prefill_seconds_per_token",
            "Seconds the engine needs per prompt token that it computes, learned from its first tokens",
            lambda e: e.rates.prefill_s_per_token(now),
        ),
        gauge(
            "engine_speed_guessed",
            "1 while the engine's times to first token are predicted by its model's other engines or by "
            "defaults: too few of its own were seen",
            lambda e: e.rates.model.guessed,
        ),
        counter(
            "speed_changes",
            "Changes of the engine's speed, up or down, seen from the errors of its predicted first tokens",
            lambda e: e.rates.model.changes,
        ),
    )


def _feed_states(engine: Engine) -> dict[str, float] | None:
    feed = engine.feed
    return None if feed is None else {str(state): feed.state == state for state in FeedState}


# Metrics of a model's index.
INDEX: tuple[Column[IndexStats], ...] = (
    gauge(
        "index_blocks", "Distinct KV blocks (by hash) that the engines of a model hold", lambda i: i.blocks
    ),
    gauge(
        "index_residencies",
        "Entries of the index: one per block, engine, medium and group of layers",
        lambda i: i.residencies,
    ),
    gauge(
        "index_extra_copies",
        "Further copies of blocks that an engine holds more than once",
        lambda i: i.extra_copies,
    ),
    gauge(
        "index_patterns",
        "Distinct sets of places that blocks are held in, which rows of the index share",
        lambda i: i.patterns,
    ),
    counter(
        "index_unknown_removals",
        "Removal events of blocks that were not known to be held",
        lambda i: i.unknown_removals,
    ),
)

# Facts that the index learned from an engine's events.
RESIDENCY: tuple[Column[EngineResidency], ...] = (
    counter(
        "index_rejected_events",
        "Events that the index skipped because they were inconsistent, by reason",
        lambda r: r.rejected,
        "reason",
    ),
    counter(
        "index_learning_skipped_blocks",
        "Blocks that were counted but not learned from, because the engine sent too many in that time",
        lambda r: r.budget.skipped,
    ),
    counter(
        "index_unlearned_blocks",
        "Blocks whose prefix is not known although hashes are learned from events: unplaced (no event shows "
        "their position), ambiguous (one prefix has two hashes), forgotten (the bound)",
        lambda r: {} if r.learned is None else r.learned.left_out,
        "reason",
    ),
    gauge(
        "index_mode",
        "1 for the way in which block hashes of prompts are found: native, learned, or not yet",
        lambda r: {r.mode: 1.0},
        "mode",
    ),
    gauge(
        "index_removals",
        "1 for what a removal event of the engine takes: one copy, the last copy, or the number it tells",
        lambda r: {str(r.removals.semantics): 1.0},
        "semantics",
    ),
    counter(
        "index_removal_evidence",
        "Evidence for it since the engine's start: removed_again (blocks), told_counts (events), "
        "phantoms (audits that found more copies than blocks)",
        lambda r: {n: getattr(r.removals, n) for n in ("removed_again", "told_counts", "phantoms")},
        "evidence",
    ),
    gauge(
        "index_re_reports_suspected",
        "1 if stored events seem to repeat earlier ones",
        lambda r: r.removals.re_reports_suspected,
    ),
)

# Predictions for an engine compared with its reports.
RECEIPTS: tuple[Column[EngineReceipts], ...] = (
    counter(
        "receipts",
        "Predictions compared with what the engine reported, by outcome",
        lambda r: r.outcomes,
        "outcome",
    ),
    counter(
        "predictions_compared",
        "Compared receipts by the farthest medium that the prediction rests on, and outcome",
        lambda r: r.by_medium,
        "medium",
        "outcome",
    ),
    counter(
        "predicted_hit_tokens",
        "Predicted hit tokens of requests whose hit the engine reported",
        lambda r: r.predicted_tokens,
    ),
    counter(
        "predicted_hit_medium_tokens",
        "Predicted hit tokens of requests whose hit the engine reported, by the medium they lie in",
        lambda r: r.predicted_by_medium,
        "medium",
    ),
    counter(
        "reported_hit_tokens",
        "Hit tokens (cached_tokens) that the engine reported, of requests with a prediction",
        lambda r: r.actual_tokens,
    ),
    counter(
        "prompt_mismatches",
        "Prompts whose token count the engine reports differently: tokenizer or template differ",
        lambda r: r.prompt_mismatches,
    ),
    counter(
        "cache_report_contradictions",
        "Reported cached tokens that contradict the engine's own events: more, fewer, or impossible",
        lambda r: r.contradictions,
        "kind",
    ),
    gauge(
        "cache_reports_doubtful",
        "1 if more than a quarter of the latest cached tokens the engine reported contradict its events",
        lambda r: bool(r.contradicting),
    ),
    gauge(
        "prediction_drifting",
        "1 if more than a quarter of the latest predictions for the engine were wrong",
        lambda r: r.drifting,
    ),
)

# Times to first token, predicted and measured.
FIRST_TOKENS: tuple[Column[FirstTokenErrors], ...] = (
    counter(
        "time_to_first_token_predictions",
        "Predicted times to first token, measured from asking the engine, by outcome: held (within 50 ms or "
        "10 % of the prediction, whichever is more), late, early",
        lambda r: r.outcomes if any(r.outcomes.values()) else None,
        "outcome",
    ),
    gauge(
        "time_to_first_token_margin_seconds",
        "Seconds on top of a predicted time to first token within which 95 of 100 of the latest came",
        lambda r: r.margin_s,
    ),
)
