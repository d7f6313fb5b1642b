"""An engine is one object: made whole, left by one ``close``, and a decision asks it for its candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest

from kvatlas.publisher.block_hash import HashScheme, block_hashes
from kvatlas.publisher.events import AllBlocksCleared
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engine_metrics import read_statement
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.statement import EngineStatement, PartPools
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.engine import Accounts, Engine, PromptView
from kvatlas.router.placement.inflight import InflightPrefixes
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.radix_parts import parts_spec
from kvatlas.router.placement.rates import PrefillSample
from kvatlas.router.placement.shadow import ShadowPrompt, ShadowSpec
from kvatlas.router.placement.snapshot import candidates
from tests.support.event_writer import Prompt, Writer, batch, removed, tokens

NOW = 100.0


def engine(name: str = "http://e:1", accounts: Accounts | None = None, **options: object) -> Engine:
    made = Engine(EngineAddress(name), accounts or Accounts(lambda: NOW), **options)  # type: ignore[arg-type]
    made.feed = FeedStats(state=FeedState.READY)
    return made


def test_an_engine_leaves_everything_it_is_in_also_where_one_part_fails() -> None:
    accounts, left = Accounts(lambda: NOW), list[str]()

    def fails(one: Engine) -> None:
        raise RuntimeError(one.engine_id)

    def make(address: EngineAddress, *, fleet_changed: Callable[[], None]) -> Engine:
        leaving = (fails, lambda one: left.append(one.engine_id))
        return Engine(address, accounts, fleet_changed=fleet_changed, leaving=leaving)

    fleet = Fleet([EngineAddress("http://a:1"), EngineAddress("http://b:1")], make)
    gone, stays = fleet
    for one in (gone, stays):
        one.learn_from(None, shadow=ShadowSpec())
        accounts.inflight.add(one.engine_id, [1, 2, 3], NOW)  # type: ignore[list-item]
        accounts.affinity.record([7, 8], one.engine_id)
        for _ in range(10):
            slow = 10.0 if one is gone else 1.0
            one.rates.observe(PrefillSample(1000, slow, 0), NOW)
    assert stays.rates.prefill_s_per_token(NOW) == pytest.approx(1.0 / 1000)
    fleet.assign(DesiredFleet((EngineAddress("http://b:1"),)))
    assert gone.closed
    assert list(fleet) == [stays]
    assert left == [gone.engine_id]
    assert accounts.inflight.common([1, 2], NOW).blocks == {stays.engine_id: 2}  # type: ignore[list-item]
    assert accounts.affinity.match([7, 8]) == {stays.engine_id: 2}
    assert accounts.rates.prefill_s_per_token == pytest.approx(1.0 / 1000)
    assert gone.shadow is None
    assert gone.residency is None


def test_an_engine_that_comes_back_is_another_one() -> None:
    accounts = Accounts(lambda: NOW)
    fleet = Fleet([EngineAddress("http://a:1")], lambda a, *, fleet_changed: Engine(a, accounts))
    (before,) = fleet
    ticket = before.load.admit(uncached_tokens=1000, now=NOW)
    fleet.assign(DesiredFleet())
    fleet.assign(DesiredFleet((EngineAddress("http://a:1"),)))
    (after,) = fleet
    assert after is not before
    before.load.finish(ticket, NOW)
    assert after.load.current(NOW).idle_s == math.inf


def held(**numbers: object) -> dict[str, EngineHit]:
    return {"http://e:1": EngineHit(**{"mode": "native", **numbers})}  # type: ignore[arg-type]


def test_a_candidate_has_what_the_engine_holds_and_has_to_do() -> None:
    one = engine()
    one.load.admit(uncached_tokens=800, now=NOW)
    asked = PromptView(
        5000,
        held(hit_tokens=1000, cpu_tokens=200, storage_tokens=300, shared_prefix_tokens=1200),
        {one.engine_id: 2000},
        {one.engine_id: 1500},
        {one.engine_id: OthersLoad(running=2, waiting=1, tokens=400)},
    )
    (found,) = candidates([one], asked, NOW)
    assert (found.running, found.waiting) == (2, 2)
    assert found.queue_s == pytest.approx(1200 * found.prefill_s_per_token)
    hit = found.hit
    assert (hit.gpu_tokens, hit.cpu_tokens, hit.storage_tokens) == (1000, 200, 300)
    assert (hit.shared_prefix_tokens, hit.coming_tokens, hit.confidence) == (2000, 1500, "exact")
    assert (hit.soon_tokens, hit.near_tokens, hit.whole_tokens) == (1500, 1500, 1500)
    assert hit.by_medium == {"GPU": 1500, "CPU": 0, "STORAGE": 0}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("eagle_groups", [(), "all"])
@pytest.mark.parametrize(("length", "shared"), [(100, 100), (96, 96), (97, 97), (100, 90), (96, 120)])
def test_blocks_predicted_of_a_prompt_ahead_equal_its_events(
    lookahead: int, eagle_groups: tuple[int, ...] | Literal["all"], length: int, shared: int
) -> None:
    """With EAGLE the lookup of the next prompt drops a block of what both share, unless hashes look ahead."""
    one, scheme = engine(), HashScheme(hash_block_size=16, lookahead=lookahead)
    fleet = FleetResidency(ModelFacts(eagle_groups=eagle_groups))
    one.learn_from(fleet.residency(one.engine_id), shadow=None)
    write, prompt = Writer(scheme), tokens(length)
    following = (prompt[:shared] + tokens(100, seed=2))[: max(length, shared)]
    fleet.apply(one.engine_id, batch(write.stored(tokens(40, seed=1))))
    layout = one.layout
    assert layout is not None
    kept = one.kept(length, Hit())
    inflight = InflightPrefixes()
    inflight.add(one.engine_id, block_hashes(prompt, scheme), NOW, kept)
    found = inflight.common(block_hashes(following, scheme), NOW, (len(following) - 1) // 16)
    asked = PromptView(len(following), held(), coming={one.engine_id: found.coming[one.engine_id] * 16})
    fleet.apply(one.engine_id, batch(write.stored(prompt)))
    later = fleet.predict(Prompt(following), [one.engine_id])[one.engine_id]
    assert one.hit(asked).coming_tokens == later.hit_tokens > 0


@pytest.mark.parametrize(("interval", "kept"), [(None, (6,)), (32, (2, 4, 6)), ("dense", (1, 2, 3, 4, 5, 6))])
def test_a_prompt_in_flight_leaves_what_its_engine_says_it_retains(
    interval: int | Literal["dense"] | None, kept: tuple[int, ...]
) -> None:
    one = engine()
    fleet = FleetResidency(ModelFacts())
    one.learn_from(fleet.residency(one.engine_id), shadow=None)
    stated = EngineStatement(source="metrics", retention_interval=interval)
    fleet.engine(one.engine_id).learn_setup(SetupEvidence(statements=(stated,)))
    windows = Writer(HashScheme(hash_block_size=16), group=1, kind="sliding_window", window=17)
    fleet.apply(one.engine_id, batch(Writer(HashScheme()).stored(tokens(40)), windows.stored(tokens(40))))
    assert sorted(end for span in one.kept(100, Hit()) for end in span) == list(kept)


@pytest.mark.parametrize(
    ("facts", "state_block", "confidence"),
    [
        (ModelFacts(mamba_cache_mode="align"), 16, "exact"),
        (ModelFacts(mamba_cache_mode="align"), 64, "pending"),
        (ModelFacts(mamba_cache_mode="align", eagle_groups=(0,)), 16, "pending"),
        (ModelFacts(mamba_cache_mode="all", eagle_groups=(0,)), 16, "exact"),
    ],
)
def test_a_hit_that_an_engine_may_miss_in_the_step_of_the_prompt_ahead_is_pending(
    facts: ModelFacts, state_block: int, confidence: str
) -> None:
    """In vLLM's scheduler (0.32), full attention of 32 and states of 16 under decode context parallelism, a
    prompt of 257 tokens hit 64 in the step of one of 246 with the same beginning, and 240 a step later. With
    blocks of one size it waits for that step (``MambaManager``, v1/core/single_type_kv_cache_manager.py).
    """
    one = engine()
    fleet = FleetResidency(facts)
    one.learn_from(fleet.residency(one.engine_id), shadow=None)
    states = Writer(HashScheme(), size=state_block, group=1, kind="mamba")
    fleet.apply(one.engine_id, batch(Writer(HashScheme()).stored(tokens(64)), states.stored(tokens(64))))
    asked = PromptView(100, held(hit_tokens=16), coming={one.engine_id: 64})
    assert one.hit(asked).confidence == confidence
    assert one.hit(PromptView(100, held(hit_tokens=64), coming={one.engine_id: 64})).confidence == "exact"


def test_a_shadow_is_not_asked_where_the_engine_says_that_it_caches_nothing() -> None:
    """vLLM turns prefix caching off for encoder-decoder models (``ModelConfig.is_prefix_caching_supported``,
    config/model.py, 0.32), and says so in its metrics."""
    one = engine()
    one.learn_from(None, shadow=ShadowSpec())
    prompt = tokens(100)
    shadows = ShadowPrompt(prompt, lambda scheme: block_hashes(prompt, scheme))
    assert one.shadow is not None
    one.shadow.served(prompt, lambda scheme: block_hashes(prompt, scheme))
    asked = PromptView(100, shadows=shadows)
    assert one.hit(asked).gpu_tokens > 0
    one.stated = read_statement(
        b'vllm:cache_config_info{enable_prefix_caching="False",engine="0"} 1.0\n', None
    )
    assert (one.hit(asked).whole_tokens, one.hit(asked).mode) == (0, "native")


def test_chunked_attention_keeps_every_block_of_a_prompt_in_flight() -> None:
    """Retention is for windows and Mamba states. A chunk's start is a hit without the blocks before it, so a
    prompt need not leave those within its own hit."""
    one = engine()
    fleet = FleetResidency(ModelFacts(attention_chunk_size=64))
    one.learn_from(fleet.residency(one.engine_id), shadow=None)
    chunked = Writer(HashScheme(), group=1, kind="chunked_local_attention")
    fleet.apply(one.engine_id, batch(Writer(HashScheme()).stored(tokens(40)), chunked.stored(tokens(40))))
    assert one.kept(100, Hit()) == (range(1, 7),)
    assert one.kept(100, Hit(64)) == (range(5, 7),)


@pytest.mark.parametrize("missing", [0, 1, 9])
def test_missed_batches_reduce_the_hit(missing: int) -> None:
    one = engine()
    one.feed = FeedStats(state=FeedState.DEGRADED, known_batches=9, missing_batches=missing)
    found = one.hit(PromptView(5000, held(hit_tokens=1600, shared_prefix_tokens=1600, alignment=16)))
    assert found.gpu_tokens == 1600 * 9 // (9 + missing) // 16 * 16
    assert (found.confidence, found.mode) == ("degraded", "native")
    assert found.shared_prefix_tokens == 1600


def test_a_hit_of_a_stale_feed_counts_as_a_shared_prefix_only() -> None:
    found = engine().hit(PromptView(5000, held(hit_tokens=1600, shared_prefix_tokens=1600, stale=True)))
    assert (found.whole_tokens, found.shared_prefix_tokens, found.confidence) == (0, 1600, "none")


def test_an_engine_that_never_stored_a_block_is_known_to_be_empty() -> None:
    one = engine()
    one.learn_from(FleetResidency(ModelFacts()).residency(one.engine_id), shadow=None)
    unknown = held(mode="unknown")
    assert one.hit(PromptView(5000, unknown)).confidence == "exact"
    assert one.hit(PromptView(5000, unknown, {one.engine_id: 16})).confidence == "none"
    one.feed = FeedStats(state=FeedState.REPLAYING)
    assert one.hit(PromptView(5000, unknown)).confidence == "none"


def test_a_shadow_stands_in_for_events() -> None:
    one, tokens = engine(), list(range(200))
    one.learn_from(None, shadow=ShadowSpec())
    assert one.shadow is not None

    def hashes_of(scheme: HashScheme) -> list[int]:
        return block_hashes(tokens, scheme)  # type: ignore[return-value]

    one.shadow.served(tokens, hashes_of)  # type: ignore[arg-type]
    asked = PromptView(200, shadows=ShadowPrompt(tokens, hashes_of))  # type: ignore[arg-type]
    found = one.hit(asked)
    assert (found.gpu_tokens, found.confidence, found.mode) == (192, "shadow", "shadow")
    one.reset()
    assert one.hit(asked).gpu_tokens == 0


@pytest.mark.parametrize("rules_first", [False, True])
def test_windows_get_events_as_long_as_they_are_followed(rules_first: bool) -> None:
    """An engine's statement may be read before its model is known, or after, and may change."""
    one, fleet, scheme = engine(), FleetResidency(ModelFacts()), HashScheme(hash_block_size=16)
    specs = [parts_spec(PartPools(16_000, window_tokens=size), 16, 15) for size in (4000, 5000)]
    prompt, write = tokens(65), Writer(scheme)
    hashes = block_hashes(prompt, scheme)
    if rules_first:
        one.follow_parts(specs[0])
    one.learn_from(fleet.residency(one.engine_id), shadow=None)
    for spec in specs:
        one.follow_parts(spec)
        fleet.apply(one.engine_id, batch(write.stored(prompt)))
        assert one.parts is not None
        assert one.parts.find(hashes, len(prompt)) == (4, 4)
        fleet.apply(one.engine_id, batch(removed(*hashes[2:])))
        assert one.parts.find(hashes, len(prompt))[1] == 2
        fleet.apply(one.engine_id, batch(AllBlocksCleared()))
        assert one.parts.find(hashes, len(prompt))[1] == 0
    left = one.parts
    one.follow_parts(None)
    fleet.apply(one.engine_id, batch(write.stored(prompt)))
    assert left is not None
    assert left.find(hashes, len(prompt))[1] == 0
    assert one.parts is None
