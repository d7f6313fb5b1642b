"""The router's own pulls: who may pull from whom, what came of it, and pairs that are left alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.engines import EngineAddress, EngineId
from kvatlas.router.openai.members import TooManyStepsError, run_cooperatively
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import SplitBody, split_body
from kvatlas.router.pd.transfer import KvSource
from kvatlas.router.placement.candidate import Hit, Pull, PullSettings
from kvatlas.router.placement.cost import Choice
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.others import OthersLoad, others_at
from kvatlas.router.placement.pull import (
    LATENCY_S,
    AskedOnce,
    PullSources,
    kv_source_of,
    link_busy_s,
    occupy_links,
    with_pull,
)
from kvatlas.router.prompts.prompt import Prompt

PullOutcome = Literal["complete", "partial", "missed", "late", "failed", "unreported", "unsent"]
_BAD: Final = frozenset({"missed", "late", "failed"})
_SAY_NOTHING: Final = frozenset({"unreported", "unsent"})
_REST_S: Final = 10.0
_REST_S_MAX: Final = 600.0
"""A pair rests after a bad pull, twice as long after each further one in a row."""
_KEYS_MAX: Final = 4096
_SOURCE_PATIENCE: Final = 2
"""A source rests after this many bad pulls in a row, by any engines."""
_PROOF_S_MAX: Final = 60.0
"""After this time a pull that was to prove its source counts as lost: twice the handshake of vLLM."""


class PullStats(msgspec.Struct):
    """Counters of pulls between engines."""

    pulls: Annotated[dict[str, int], "kvatlas_pulls_total{outcome}"] = msgspec.field(default_factory=dict)
    """Pulls by outcome: `complete`; `partial`: at least half of the tokens came; `missed`: less; `late`: the
    first token came later than it would have by computing; `failed`: the engine gave no answer;
    `unsent`: the router did not send it, or took it back; `unreported`:
    the answer does not say how many tokens were cached."""
    not_possible: Annotated[dict[str, int], "kvatlas_pulls_not_possible_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests for which no pull was considered, by the field of the request that forbids it."""
    promised_tokens: Annotated[int, "kvatlas_pull_promised_tokens_total"] = 0
    """Tokens that decisions expected to be pulled, of pulls with a report."""
    pulled_tokens: Annotated[int, "kvatlas_pull_tokens_total"] = 0
    """Of these, tokens that came."""
    link_s: Annotated[float, "kvatlas_pull_link_seconds_total"] = 0.0
    """Predicted seconds of transfers, with their waits for a link."""
    rests: Annotated[int, "kvatlas_pull_pair_rests_total"] = 0
    """Times that a pair of engines was left alone after a bad pull."""
    source_rests: Annotated[int, "kvatlas_pull_source_rests_total"] = 0
    """Times that a source of pulls was left alone by all engines after two bad pulls or more in a row."""


class Rests:
    """Pulls that are left alone for a while, since their latest ones were bad: by pair of target and source,
    or by source. A key rests from its ``patience``-th bad pull in a row on. Bounded; times are of one
    clock."""

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._bad: dict[tuple[str, ...], tuple[int, float]] = {}

    def allows(self, *key: str, now: float) -> bool:
        """Whether this key does not rest."""
        found = self._bad.get(key)
        return found is None or now >= found[1]

    def in_a_row(self, *key: str) -> int:
        """Number of its bad pulls since the latest good one."""
        return self._bad.get(key, (0, 0.0))[0]

    def good(self, *key: str) -> None:
        """Forget the bad pulls of a key."""
        self._bad.pop(key, None)

    def bad(self, *key: str, now: float) -> bool:
        """Count a bad pull. Returns whether the key rests now."""
        count = self._bad.pop(key, (0, 0.0))[0] + 1
        if len(self._bad) >= _KEYS_MAX:
            del self._bad[next(iter(self._bad))]
        rests = count >= self._patience
        until = now + min(_REST_S_MAX, _REST_S * 2.0 ** min(count - self._patience, 16)) if rests else now
        self._bad[key] = count, until
        return rests


class SourceProofs:
    """Sources from which a pull was seen to work. The address of a source is a guess until then (port 5710),
    and a wrong one costs each pull the whole time-out of a handshake: so one pull at a time goes to an
    unproven one."""

    def __init__(self) -> None:
        self._proven: dict[str, bool] = {}
        self._asked: dict[str, float] = {}

    def allows(self, source_id: str, now: float) -> bool:
        """Whether it is proven, or no pull is under way to prove it."""
        return source_id in self._proven or now >= self._asked.get(source_id, -math.inf) + _PROOF_S_MAX

    def begun(self, source_id: str, now: float) -> None:
        """Note a pull from a source."""
        if source_id not in self._proven:
            self._asked.pop(source_id, None)
            self._asked[source_id] = now
            if len(self._asked) > _KEYS_MAX:
                del self._asked[next(iter(self._asked))]

    def ended(self, source_id: str, *, worked: bool, failed: bool) -> None:
        """Note the end of a pull."""
        self._asked.pop(source_id, None)
        if worked:
            self._proven[source_id] = True
            if len(self._proven) > _KEYS_MAX:
                del self._proven[next(iter(self._proven))]
        elif failed:
            self._proven.pop(source_id, None)


class RestingSource(NamedTuple):
    """A source whose latest ``bad_pulls`` brought nothing, and its address; ``given``: it is configured."""

    bad_pulls: int
    address: str
    given: bool


class PullOrder(msgspec.Struct, frozen=True, gc=False):
    """A chosen pull. ``hit``: of the target, with the pulled prefix; ``saved_s``: predicted seconds by which
    the first token comes sooner than by computing."""

    pull: Pull
    source: Engine
    kv_source: KvSource
    hit: Hit
    saved_s: float

    def came_tokens(self, cached: int | None) -> int | None:
        """Tokens that the engine reports as ``cached`` beyond those that it held itself, at most those of the
        pull; None without a report."""
        if cached is None:
            return None
        own = self.hit.whole_tokens - self.pull.tokens
        return min(self.pull.tokens, max(0, cached - own))


class Pulls:
    """Pulls of one router. ``enabled``: they are considered."""

    def __init__(self) -> None:
        self.others: Mapping[str, OthersLoad] | None = {}
        """Latest load of other routers, with their use of links."""
        self.pairs = Rests()
        self.sources = Rests(_SOURCE_PATIENCE)
        self._proofs = SourceProofs()
        self.stats = PullStats()
        self.configure(PullSettings(), 0)

    def configure(self, settings: PullSettings, port: int) -> None:
        """Set the settings of later decisions; ``port``: of engines whose ``p2p`` tier has no other."""
        self._s_per_token, self.enabled, self._port = settings.s_per_token, settings.enabled, port

    def source_of(self, engine: EngineAddress) -> tuple[str, int]:
        """Return host and port of the engine's ``p2p`` tier."""
        return kv_source_of(engine, self._port)

    async def body(
        self, request: InboundRequest, messages: Sequence[msgspec.Raw], read: Prompt
    ) -> SplitBody | None:
        """Return the body to which a source can be added; None: the request cannot pull. Those that cannot be
        split over two engines cannot pull either: children of one request would end each other's transfers,
        and vLLM loads nothing where prompt log-probabilities are asked for."""
        if request.carried == "gateway" or request.pinned is not None or read.skips_cache or read.variants:
            return None
        try:
            found = await run_cooperatively(split_body(request.path, request.body, messages))
        except TooManyStepsError:
            return None
        if not found.whole:
            return found
        self.stats.not_possible[found.whole] = self.stats.not_possible.get(found.whole, 0) + 1
        return None

    def apply(
        self,
        choice: Choice,
        engines: Sequence[Engine],
        held: Mapping[str, int],
        body: SplitBody,
        now: float,
        *,
        by_header: bool = False,
    ) -> tuple[Choice, PullOrder | None]:
        """Return the choice, with a pull if one is cheaper. ``held``: tokens of the prompt that host memories
        hold by themselves. ``by_header``: a sidecar is given the source."""
        if not held:
            return choice, None
        tokens = list(map(held.get, choice.scored.candidates.engine_ids, repeat(0)))

        def allowed(target: int, source: int) -> bool:
            to, of = engines[target], engines[source]
            return (
                _alike(to, of)
                and _answers(of)
                and self.sources.allows(of.engine_id, now=now)
                and self._proofs.allows(of.engine_id, now)
                and self.pairs.allows(to.engine_id, of.engine_id, now=now)
            )

        def serves(at: int) -> bool:
            return _serves(engines[at]) and (not by_header or self._can_be_named(engines[at]))

        prompt_tokens = choice.scored.prompt_tokens
        full = any(engine.load.pages.free < 0 for engine in engines)
        sources = PullSources(
            tokens,
            AskedOnce(lambda at: self._busy_s(engines[at], now)),
            self._s_per_token,
            AskedOnce(lambda at: 1.0 if full else engines[at].load.pages.used_share(prompt_tokens)),
            LATENCY_S,
            allowed,
            serves,
        )
        found = with_pull(choice, sources)
        pull = found.pull
        if pull is None:
            return choice, None
        source, candidate = engines[pull.source], found.scored.candidates[found.index]
        host, port = kv_source_of(source.engine, self._port)
        hit = candidate.hit
        return found, PullOrder(
            pull,
            source,
            KvSource(body, host, port),
            msgspec.structs.replace(
                hit,
                cpu_tokens=pull.end - hit.gpu_tokens,
                storage_tokens=0,
                shared_prefix_tokens=max(pull.end, hit.shared_prefix_tokens),
            ),
            (candidate.prefill_s_per_token - found.scored.settings.load_s_per_token) * pull.tokens
            - pull.link_s,
        )

    def _can_be_named(self, engine: Engine) -> bool:
        """Whether a sidecar finds its ``p2p`` tier by its host alone."""
        host = urlsplit(engine.engine.base_url).hostname
        return engine.engine.dp_rank is None and kv_source_of(engine.engine, self._port) == (host, self._port)

    def _busy_s(self, engine: Engine, now: float) -> float:
        """Seconds until the engine's link is free."""
        return link_busy_s(engine.load, others_at(engine.engine_id, self.others), now)

    def begin(self, target: Engine, order: PullOrder, now: float) -> None:
        """Note that the target is asked now."""
        occupy_links(target.load, order.source.load, order.pull.link_s, now)
        self._proofs.begun(order.source.engine_id, now)
        self.stats.link_s += order.pull.link_s

    def end(self, target_id: EngineId, order: PullOrder, outcome: PullOutcome, now: float) -> None:
        """Note the end of a pull."""
        stats, source_id = self.stats, order.source.engine_id
        stats.pulls[outcome] = stats.pulls.get(outcome, 0) + 1
        if outcome in _BAD:
            stats.rests += 1
            self.pairs.bad(target_id, source_id, now=now)
            # An answer that failed is the target's doing: its source may serve others.
            if outcome != "failed":
                stats.source_rests += self.sources.bad(source_id, now=now)
        elif outcome not in _SAY_NOTHING:
            self.pairs.good(target_id, source_id)
            self.sources.good(source_id)
        failed = self.sources.in_a_row(source_id) >= _SOURCE_PATIENCE
        self._proofs.ended(source_id, worked=outcome in {"complete", "partial"}, failed=failed)

    def resting_source(self, engine: EngineAddress) -> RestingSource | None:
        """Return what is known of a source whose latest pulls were all bad; None: there were fewer."""
        count = self.sources.in_a_row(engine.engine_id)
        if count < _SOURCE_PATIENCE:
            return None
        host, port = kv_source_of(engine, self._port)
        return RestingSource(count, f"{host}:{port}", given=engine.kv_source is not None)

    def judge(
        self, order: PullOrder, came: int | None, predicted_s: float | None, measured_s: float | None
    ) -> PullOutcome:
        """Return the outcome, and count the tokens. ``came``: tokens, None without a report; then the seconds
        to the first token, None if unknown."""
        promised = order.pull.tokens
        if came is None:
            return "unreported"
        self.stats.promised_tokens += promised
        self.stats.pulled_tokens += came
        # Prompts that wait lose blocks to eviction: half of them speak for the pair.
        if 2 * came < promised:
            return "missed"
        if predicted_s is not None and measured_s is not None and measured_s > predicted_s + order.saved_s:
            return "late"
        return "complete" if came == promised else "partial"


def _answers(source: Engine) -> bool:
    """Whether its probe has found nothing against it as a source."""
    shown = None if source.probe is None else source.probe.pull_source
    return shown is None or shown.verdict == "proven"


def _serves(engine: Engine) -> bool:
    """Whether what its host memory holds is known, and others may fetch it: vLLM with events that were all
    received."""
    feed = engine.feed
    known = feed is not None and feed.state is FeedState.READY and not feed.unconfirmed
    return known and engine.frontend != "sglang" and not engine.closed


def _alike(target: Engine, source: Engine) -> bool:
    """Whether an engine can use another one's blocks: of the same version, model and groups, under the same
    hashes. vLLM compares dtypes and parallelism itself when the two connect (p2p/session/session.py
    ``_on_connect``, 0.32)."""
    layout = target.layout
    return (
        target.version is not None
        and target.version == source.version
        and target.base_model == source.base_model
        and layout is not None
        and layout == source.layout
        and target.scheme == source.scheme
    )
