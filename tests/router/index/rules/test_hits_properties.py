"""Hit rules over random models: against a slow reading of the rules, against the pool's finders, and laws."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash, encode_batch
from kvatlas.publisher.groups import Family, GroupSpec, SpecClass
from kvatlas.publisher.pool.hits import HitFinder
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.router.index.base import WORD_BITS, Plane, Rows
from kvatlas.router.index.hit_rules import evaluate
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.search_order import order_matters
from tests.router.index.rules.layouts import (
    Engine,
    chunked,
    engines,
    evaluate_one,
    full,
    hashes_of,
    mamba,
    models,
    residencies,
    rows_of,
    runs,
    window,
)
from tests.support.examples import examples, some

Units = dict[int, set[int]]


def serves(boundary: int, spec_class: SpecClass, layout: CacheLayout, units: Units, num_tokens: int) -> bool:
    """Whether a class could resume at ``boundary``: the rules word by word, one block at a time."""
    unit, size = layout.hash_block_size, spec_class.block_size
    last = (num_tokens - 1) // unit if layout.single_group else num_tokens // unit
    eagle = spec_class.spec.is_eagle and not layout.lookahead

    def has(end: int) -> bool:
        number = end // unit - 1
        limit = last if eagle else num_tokens // unit
        return end % unit == 0 and number < limit and all(number in units[g] for g in spec_class.group_idxs)

    def block(number: int) -> bool:
        return has((number + 1) * size)

    match spec_class.family:
        case Family.FULL:
            end = boundary + (min(layout.alignment, size) if eagle else 0)
            if not all(block(number) for number in range(end // size)):
                return False
            if end % size == 0:
                return True
            top = min((end // size + 1) * size, num_tokens - 1 + (unit if eagle else 0))
            return any(has(longer) for longer in range(end, top + 1, unit))
        case Family.WINDOW:
            ends, wanted = boundary // size, -(-((spec_class.spec.sliding_window or 1) - 1) // size)
            number, run = ends - 1 + eagle, 0
            while number >= 0 and run < max(1, wanted + eagle) and block(number):
                number, run = number - 1, run + 1
            return number < 0 or run >= max(1, wanted + eagle)
        case Family.CHUNKED:
            chunk = spec_class.spec.attention_chunk_size or 0
            return all(block(number) for number in range(boundary // chunk * chunk // size, boundary // size))
        case _:
            return has(boundary)


def slow_hit(layout: CacheLayout, num_tokens: int, units: Units) -> int:
    """The last boundary short of the last token that every class serves."""
    boundaries = range((num_tokens - 1) // layout.alignment * layout.alignment, 0, -layout.alignment)
    for boundary in boundaries:
        if all(serves(boundary, c, layout, units, num_tokens) for c in layout.classes):
            return boundary
    return 0


def engine_hit(layout: CacheLayout, num_tokens: int, units: Units) -> int:
    """Hits of the pool's finders, which search as the engine does, over the same residency."""
    scheme = HashScheme(hash_block_size=layout.hash_block_size)
    maps = [{1000 + number: 1 for number in units[group.group_idx]} for group in layout.groups]
    finder = HitFinder(pool_layout(layout.groups, scheme, None), maps)  # type: ignore[arg-type]
    return finder.find(hashes_of(num_tokens, layout), num_tokens - 1).length


cases = st.tuples(models(), st.integers(1, 420)).flatmap(
    lambda case: st.tuples(st.just(case[0]), st.just(case[1]), residencies(*case))
)


@settings(max_examples=examples(150))
@given(cases)
def test_equals_the_rules_read_slowly(case: tuple[CacheLayout, int, Units]) -> None:
    layout, num_tokens, units = case
    assume(not order_matters(layout))
    assert evaluate_one(layout, num_tokens, units).hit[0] == slow_hit(layout, num_tokens, units)


@settings(max_examples=examples(300))
@given(cases)
def test_equals_what_the_engine_finds(case: tuple[CacheLayout, int, Units]) -> None:
    layout, num_tokens, units = case
    assert evaluate_one(layout, num_tokens, units).hit[0] == engine_hit(layout, num_tokens, units)


ORDERED = [
    (full(0, 32), window(1, 128, 16, is_eagle=True)),
    (full(0, 32), window(1, 96, 16), window(2, 64, 16, is_eagle=True)),
    (full(0), window(1, 48, is_eagle=True), window(2, 64, is_eagle=True)),
    (full(0), window(1, 48, is_eagle=True), mamba(2, "align", 16, is_eagle=True)),
    (window(0, 48, 32, is_eagle=True), window(1, 64, is_eagle=True)),
    (window(0, 48, is_eagle=True), window(1, 64, 32, is_eagle=True)),
    (full(0, 64), window(1, 1, 16, is_eagle=True), window(2, 200, 32, is_eagle=True)),
    (full(0), window(1, 1, is_eagle=True), window(2, 64)),
    (full(0, 32), window(1, 1, 16, is_eagle=True)),
    (window(0, 1, is_eagle=True), window(1, 1)),
    (window(0, 1, is_eagle=True), window(1, 64)),
    (window(0, 1, is_eagle=True), chunked(1, 64)),
    (mamba(0, "align"), window(1, 1, is_eagle=True)),
    (full(0, is_eagle=True), full(1), window(2, 1, is_eagle=True), mamba(3, "align")),
    (full(0, 48), mamba(1, "align", 32), full(2, 64)),
    (full(0, 64), full(1, 48), full(2, 16), mamba(3, "align", 32)),
    (full(0, 64, is_eagle=True), mamba(1, "align", 32), full(2, 48)),
    (full(0, 64), full(1, 32, is_eagle=True), mamba(2, "align", 64), window(3, 40, 16)),
]


@pytest.mark.parametrize("groups", some(ORDERED, 3))
def test_where_the_order_matters_hits_equal_what_the_engine_finds(groups: tuple[GroupSpec, ...]) -> None:
    layout = make_layout(groups, ModelFacts(), None)
    assert order_matters(layout)
    rng = random.Random(str(groups))
    for _ in range(examples(400)):
        num_tokens = rng.randrange(1, 700)
        count, density = num_tokens // layout.hash_block_size, rng.choice([0.5, 0.8, 0.95, 1.0])
        units = {g.group_idx: {n for n in range(count) if rng.random() < density} for g in groups}
        assert evaluate_one(layout, num_tokens, units).hit[0] == engine_hit(layout, num_tokens, units)


def test_engines_that_all_hold_the_same_are_asked_as_often_as_one() -> None:
    layout = make_layout((window(0, 1, is_eagle=True), window(1, 1)), ModelFacts(), None)
    rows = rows_of({0: [5], 1: [5]}, 96, layout)
    assert evaluate(rows, layout, 96).hit[0] == engine_hit(layout, 96, {0: {5}, 1: {5}})
    everyone = np.uint64((1 << WORD_BITS) - 1)
    alike = {column: np.where(held, everyone, held) for column, held in rows.columns.items()}
    assert evaluate(Rows(rows.num_hashes, alike), layout, 96).hit == [0] * WORD_BITS


@settings(max_examples=examples(80))
@given(cases)
def test_a_hit_is_aligned_and_leaves_a_token(case: tuple[CacheLayout, int, Units]) -> None:
    layout, num_tokens, units = case
    hits = evaluate_one(layout, num_tokens, units, detail=True)
    for tokens in (hits.hit[0], hits.shared_prefix[0], *(by_class[0] for by_class in hits.by_class)):
        assert tokens % layout.alignment == 0
        assert 0 <= tokens <= num_tokens - 1
    assert hits.hit[0] <= hits.shared_prefix[0]
    if not order_matters(layout):
        assert all(hits.hit[0] <= by_class[0] for by_class in hits.by_class)
    assert not any(layout.classes[0].family is not Family.CHUNKED and tokens for tokens in hits.hit[1:])


@given(cases, st.data())
def test_more_blocks_never_shorten_a_hit(case: tuple[CacheLayout, int, Units], data: st.DataObject) -> None:
    layout, num_tokens, units = case
    assume(not order_matters(layout))
    more = data.draw(residencies(layout, num_tokens))
    joined = {group: units[group] | more[group] for group in units}
    before, after = evaluate_one(layout, num_tokens, units), evaluate_one(layout, num_tokens, joined)
    assert after.hit[0] >= before.hit[0]
    assert after.shared_prefix[0] >= before.shared_prefix[0]


@settings(max_examples=examples(80))
@given(cases, st.integers(1, 200))
def test_a_longer_prompt_with_the_same_start_never_hits_less(
    case: tuple[CacheLayout, int, Units], more: int
) -> None:
    layout, num_tokens, units = case
    assume(not order_matters(layout))
    assert (
        evaluate_one(layout, num_tokens + more, units).hit[0]
        >= evaluate_one(layout, num_tokens, units).hit[0]
    )


class Prompt:
    """Arguments of ``predict``."""

    def __init__(self, request: PoolRequest) -> None:
        self.num_tokens = request.num_tokens
        self.token_ids, self.extras = request.token_ids, request.extras
        self._hashes = [BlockHash(int(block)) for block in request.known_hashes()]  # type: ignore[arg-type]

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        del scheme
        return self._hashes


def serve(pool: HybridBlockPool, request: PoolRequest, rng: random.Random) -> None:
    """One request, computed in chunks, with a few generated tokens."""
    if pool.start(request) is None:
        return
    while chunk := pool.next_chunk(request, rng.choice([40, 100, 8192])):
        if not pool.compute(request, chunk):
            break
        pool.end_step()
    else:
        for _ in range(rng.randrange(30)):
            request.append(rng.randrange(50))
            if not pool.compute(request, 1):
                break
            pool.end_step()
    pool.finish(request)


def test_events_of_a_pool_predict_its_hits() -> None:
    """Everything between: the pool's events on the wire, learned groups, detected scheme, counted copies."""
    hits: list[int] = []

    @settings(max_examples=examples(60))
    @given(engines().filter(runs).filter(publishes_immediately), st.integers(0, 1 << 30))
    def equal(engine: Engine, seed: int) -> None:
        hits.extend(hits_of(engine, random.Random(seed)))

    equal()
    assert sum(hit > 0 for hit in hits) > len(hits) // 3, "a run without hits shows nothing"


def publishes_immediately(engine: Engine) -> bool:
    """Whether its first prompts publish blocks: chunked groups alone may not, and until then the index knows
    nothing of the engine."""
    return any(not group.is_hidden and group.family is not Family.CHUNKED for group in engine.groups)


def hits_of(engine: Engine, rng: random.Random) -> list[int]:
    """The hits of random prompts at a pool; fails where the index predicts others from its events."""
    layout = pool_layout(engine.groups, engine.scheme, engine.retention, engine.dcp)
    longest = max(400, 3 * layout.scheduler_block_size)
    pool = HybridBlockPool(
        engine.groups,
        num_blocks=sum(longest // group.block_size + 3 for group in engine.groups) * 2,
        scheme=engine.scheme,
        retention_interval=engine.retention,
        dcp_world_size=engine.dcp,
    )
    fleet = FleetResidency(engine.facts)
    history = [[rng.randrange(50) for _ in range(longest)]]
    hits: list[int] = []
    for turn in range(24):
        base = rng.choice(history) if turn > 2 else history[0]
        prompt = base[: rng.randrange(1, len(base) + 1) if turn > 2 else longest - 100]
        prompt += [rng.randrange(50) for _ in range(rng.randrange(120))]
        request = pool.request(prompt)
        if turn > 2:  # by then every group has been seen, in whole blocks
            hits.append(pool.find_hit(request))
            assert fleet.predict(Prompt(request), ["a"])["a"].hit_tokens == hits[-1]
        serve(pool, request, rng)
        history.append(list(request.token_ids)[:longest])
        if events := pool.take_events():
            fleet.apply("a", decode_batch(encode_batch(0.0, events)))
            fleet.engine("a").finish_detection()
        for group in engine.groups:
            held = {int(block) for block in pool.resident(group.group_idx)}  # type: ignore[arg-type]
            assert fleet.index.copies("a", Plane("GPU", group.group_idx)) == len(held)
    assert fleet.index.stats().unknown_removals == 0
    return hits
