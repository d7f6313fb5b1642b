"""Learned mode: exact where every position can be told, never more than is there, and what it cannot do."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, MultimodalItem, PromptExtras
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockRemoved, BlockStored, Event, encode_batch
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.index.learn import hash_scheme as detect
from kvatlas.router.index.learn import learned_keys as learned
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.model import FleetResidency
from tests.router.index.rules.layouts import full, window
from tests.support.event_writer import WINDOW, Prompt, Writer, batch, random_chain, tokens
from tests.support.examples import examples

SCHEME = HashScheme()


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "SEEDS_MAX", 4)


def secretly(size: int = 16, **options: Any) -> Writer:
    return Writer(SCHEME, chain=random_chain(9, 16), size=size, **options)


def nowhere(block: int) -> bool:
    return False


def learn(*events: Event, facts: ModelFacts | None = None) -> FleetResidency:
    """A fleet with one engine in learned mode that has sent these events."""
    fleet = FleetResidency(facts or ModelFacts())
    fleet.apply("a", batch(*events))
    fleet.engine("a").finish_detection()
    assert fleet.engine("a").detection is Detection.LEARNED
    return fleet


def hit(fleet: FleetResidency, prompt: list[int], extras: PromptExtras = NO_EXTRAS) -> int:
    answer = fleet.predict(Prompt(prompt, extras), ["a"])["a"]
    assert answer.mode == "learned"
    return answer.hit_tokens


def test_prefixes_of_full_events_are_known() -> None:
    writer, prompt = secretly(), tokens(200)
    fleet = learn(writer.stored(prompt, stop=5), writer.stored(prompt, start=5, stop=9))
    assert hit(fleet, prompt) == 144
    assert hit(fleet, prompt[:100] + tokens(100, seed=1)) == 96
    assert hit(fleet, tokens(200, seed=1)) == 0


def test_removed_blocks_do_not_hit() -> None:
    writer, prompt = secretly(), tokens(200)
    fleet = learn(writer.stored(prompt))
    fleet.apply("a", batch(BlockRemoved([writer.hashes(prompt)[4]], "GPU", 0)))
    assert hit(fleet, prompt) == 64


def test_masked_blocks_are_placed_by_a_full_event_of_another_group() -> None:
    prompt = tokens(200)
    chain = random_chain(9, 16)
    dense = Writer(SCHEME, chain=chain)
    sparse = Writer(SCHEME, chain=chain, group=1, kind=WINDOW, window=64)
    fleet = learn(dense.stored(prompt), sparse.stored(prompt, keep=[4, 5, 6, 7]))
    assert hit(fleet, prompt) == 128


def test_masked_blocks_that_nothing_places_are_not_claimed() -> None:
    prompt, sparse = tokens(200), secretly(kind=WINDOW, window=64)
    fleet = learn(sparse.stored(tokens(64, seed=1)), sparse.stored(prompt, keep=[4, 5, 6, 7]))
    assert hit(fleet, prompt) == 0


def test_blocks_of_unknown_parents_are_counted_and_not_claimed() -> None:
    prompt, writer = tokens(200), secretly()
    fleet = learn(writer.stored(tokens(100, seed=1)), writer.stored(prompt, start=3))
    assert hit(fleet, prompt) == 0
    mapping = fleet.engine("a").learned
    assert mapping is not None
    assert mapping.left_out["unplaced"] == 9


def test_a_block_of_several_hash_blocks() -> None:
    prompt = tokens(200)
    chain = random_chain(9, 16)
    coarse = Writer(SCHEME, chain=chain, size=64)
    fine = Writer(SCHEME, chain=chain, group=1, kind=WINDOW, window=17)
    fleet = learn(fine.stored(prompt), coarse.stored(prompt))
    assert hit(fleet, prompt) == 192


@pytest.mark.parametrize(
    "extras",
    [
        PromptExtras("sql", "/adapters/sql"),
        PromptExtras(cache_salt="tenant"),
        PromptExtras(multimodal=(MultimodalItem("image", 20, 30),)),
        PromptExtras("sql", None, "tenant", (MultimodalItem("image", 20, 30), MultimodalItem("b", 50, 2))),
    ],
    ids=["lora", "salt", "image", "all"],
)
def test_extra_keys_are_part_of_the_prefix(extras: PromptExtras) -> None:
    prompt, writer = tokens(200), secretly()
    fleet = learn(writer.stored(tokens(50, seed=1)), writer.stored(prompt, extras))
    assert hit(fleet, prompt, extras) == 192
    before_the_image = 16 if extras.multimodal and not extras.lora_name else 0
    assert hit(fleet, prompt) == before_the_image
    assert hit(fleet, prompt, PromptExtras(cache_salt="other")) == 0


def test_extra_keys_in_blocks_larger_than_a_hash_block_are_left_out() -> None:
    prompt = tokens(200)
    chain = random_chain(9, 16)
    coarse = Writer(SCHEME, chain=chain, size=64)
    fine = Writer(SCHEME, chain=chain, group=1, kind=WINDOW, window=17)
    salted = PromptExtras(cache_salt="tenant")
    fleet = learn(fine.stored(tokens(64, seed=1)), coarse.stored(prompt, salted))
    assert hit(fleet, prompt, salted) == 0
    mapping = fleet.engine("a").learned
    assert mapping is not None
    assert mapping.left_out["unplaced"] > 0


def test_look_ahead_hashes() -> None:
    scheme = HashScheme(lookahead=1)
    prompt = tokens(200)

    def chain(token_ids: Any, extras: PromptExtras) -> list[bytes]:
        known = random_chain(3, 16)(list(token_ids), extras)
        return known[: (len(token_ids) - 1) // 16]

    fleet = learn(Writer(scheme, chain=chain).stored(prompt))
    assert hit(fleet, prompt) == 192
    assert hit(fleet, [*prompt[:96], 7]) == 80, "the block before 96 covers the token at 96 too"


def test_an_engine_hash_of_zero_is_not_the_hash_of_everything() -> None:
    """Unknown prefixes must not translate to a hash that an engine can send."""
    writer, prompt = secretly(), tokens(100)
    zero = writer.stored(tokens(32, seed=4))
    zero.block_hashes = [0, b""]
    fleet = learn(writer.stored(prompt), zero)
    assert hit(fleet, tokens(100, seed=8)) == 0
    assert hit(fleet, prompt) == 96


def test_translation_of_unknown_keys_is_no_hash() -> None:
    assert LearnedKeys().translate([1, 2]) == [-1, -1]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "_ENTRIES_MAX", 100)
    monkeypatch.setattr(learned, "_FORGOTTEN", 20)


@pytest.mark.usefixtures("small")
def test_the_mapping_is_bounded() -> None:
    keys, writer = LearnedKeys(), secretly()
    for seed in range(40):
        keys.observe(writer.stored(tokens(160, seed=seed)), 16, nowhere)
        assert len(keys) <= 100
        assert len(keys._hash_of) <= 100
    own = Prompt(tokens(170, seed=39)).hashes(detect.learned_scheme(16))
    assert keys.translate(own) == writer.hashes(tokens(160, seed=39)), "the latest stay"
    assert keys.left_out["forgotten"] == 400 - len(keys)


def test_events_and_reports_that_wait_for_each_other_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "_ORPHANS_TOKENS_MAX", 1000)
    monkeypatch.setattr(learned, "_ORPHAN_TOKENS_MAX", 320)
    keys, writer, scheme = LearnedKeys(), secretly(), detect.learned_scheme(16)
    for seed in range(20):
        keys.observe(writer.stored(tokens(336, seed=seed), start=1), 16, nowhere)
        assert sum(map(len, keys._orphans)) <= 1000
    prompt = tokens(336, seed=19)
    keys.place(tokens(5000, seed=99), NO_EXTRAS, 16, scheme, nowhere)
    assert [len(report[0]) for report in keys._reports] == [336], "no more than may be compared"
    keys.place(prompt, NO_EXTRAS, 16, scheme, nowhere)
    assert keys.translate(Prompt(prompt).hashes(scheme))[1:] == writer.hashes(prompt)[1:], "the latest"


@pytest.mark.usefixtures("small")
def test_keys_placed_by_reports_are_bounded() -> None:
    keys, writer, scheme = LearnedKeys(), secretly(), detect.learned_scheme(16)
    for seed in range(30):
        prompt = tokens(336, seed=seed)
        keys.observe(writer.stored(prompt, start=10), 16, nowhere)
        keys.place(prompt, NO_EXTRAS, 160, scheme, nowhere)
        assert len(keys._within) <= 100
        assert len(keys._behind) <= 10


@pytest.mark.usefixtures("small")
def test_evicted_blocks_are_forgotten_first() -> None:
    keys, writer = LearnedKeys(), secretly()
    held: set[int] = set()
    for seed in range(20):
        prompt = tokens(160, seed=seed)
        hashes = writer.hashes(prompt)
        keys.observe(writer.stored(prompt), 16, held.__contains__)
        if seed:
            keys.evicted(hashes)  # type: ignore[arg-type]  # numbers
        else:
            held.update(hashes)  # type: ignore[arg-type]
            keys.evicted(hashes)  # type: ignore[arg-type]  # one of two copies
    own = Prompt(tokens(170, seed=0)).hashes(detect.learned_scheme(16))
    assert keys.translate(own) == writer.hashes(tokens(160, seed=0)), "the system prompt, which is held"


@pytest.mark.usefixtures("small")
def test_the_same_prefix_under_ever_new_hashes_stays_bounded() -> None:
    keys = LearnedKeys()
    for seed in range(40):
        keys.observe(Writer(SCHEME, chain=random_chain(seed, 16)).stored(tokens(160)), 16, nowhere)
    assert len(keys) <= 100
    assert len(keys._hash_of) <= 100


def run_pool(groups: tuple[GroupSpec, ...], seed: int, *, retention: int | None) -> list[tuple[int, int]]:
    """(predicted, true) hits over a random load on an engine with an unknown seed."""
    rng = random.Random(seed)
    pool = HybridBlockPool(
        groups, num_blocks=120, scheme=HashScheme(seed="secret"), retention_interval=retention
    )
    fleet = FleetResidency(ModelFacts())
    history, seen = [[rng.randrange(20) for _ in range(300)]], []
    for turn in range(25):
        base = rng.choice(history)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [
            rng.randrange(20) for _ in range(rng.randrange(80))
        ]
        if turn < 2:
            prompt = [rng.randrange(20) for _ in range(200)]
        request = pool.request(prompt)
        if turn > 2:
            answer = fleet.predict(Prompt(prompt), ["a"])["a"]
            assert answer.mode != "native"
            seen.append((answer.hit_tokens, pool.find_hit(request)))
        if pool.start(request) is not None:
            while (chunk := pool.next_chunk(request, rng.choice([50, 8192]))) and pool.compute(
                request, chunk
            ):
                pool.end_step()
            pool.finish(request)
        history.append(prompt)
        if events := pool.take_events():
            fleet.apply("a", decode_batch(encode_batch(0.0, events)))
            fleet.engine("a").finish_detection()
    return seen


@settings(max_examples=examples(15))
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([(full(),), (full(), window(1, 64)), (window(0, 96),), (full(0, 32), window(1, 40))]),
    st.sampled_from([0, None]),
)
def test_never_predicts_more_than_there_is(
    seed: int, groups: tuple[GroupSpec, ...], retention: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect, "SEEDS_MAX", 4)
        pairs = run_pool(groups, seed, retention=retention)
    assert all(predicted <= true for predicted, true in pairs)


@settings(max_examples=examples(15))
@given(st.integers(0, 1 << 30), st.sampled_from([(full(),), (full(), window(1, 64))]))
def test_is_exact_where_full_attention_tells_every_position(seed: int, groups: tuple[GroupSpec, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect, "SEEDS_MAX", 4)
        pairs = run_pool(groups, seed, retention=None)
    assert all(predicted == true for predicted, true in pairs)
    assert any(true for _, true in pairs)


def test_stored_events_of_odd_sizes_are_left_alone() -> None:
    keys = LearnedKeys()
    odd = secretly().stored(tokens(48))
    odd.block_size = 24
    keys.observe(odd, 16, nowhere)
    assert len(keys) == 0
    assert isinstance(odd, BlockStored)
