"""The pool with one model at a time: chat, retention, copies, reuse, events."""

from __future__ import annotations

import pytest

from kvatlas.publisher.block_hash import HashChain, HashScheme, MultimodalItem, PromptExtras, block_hashes
from kvatlas.publisher.block_pool import HybridBlockPool, IntegrityError
from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool.hits import window_blocks
from tests.publisher.pool.pools import (
    CopyCounter,
    chunked,
    full,
    generate,
    make_pool,
    mamba,
    prefill,
    run,
    window,
)

PROMPT = list(range(1000, 1163))


def chat_hits(pool: HybridBlockPool) -> list[int]:
    """Hits of turns 2 to 4: 163 tokens asked, then 100 answered and 20 asked per turn."""
    text, hits = PROMPT.copy(), []
    for turn in range(4):
        answer = list(range(5000 + turn * 200, 5100 + turn * 200))
        hits.append(run(pool, text, answer))
        text = text + answer + list(range(9000 + turn * 50, 9020 + turn * 50))
    return hits[1:]


@pytest.mark.parametrize(
    ("groups", "hash_block", "retention", "hits"),
    [
        ((full(0), window(1, 64)), 16, 0, [160, 272, 400]),
        ((full(0), window(1, 64)), 16, None, [256, 368, 496]),
        ((full(0, 32), mamba(1, "align", 32)), 32, 0, [160, 256, 384]),
        ((full(0, 32), mamba(1, "align", 32)), 32, None, [256, 352, 480]),
    ],
)
def test_next_turn_reuses_what_retention_keeps(
    groups: tuple[GroupSpec, ...], hash_block: int, retention: int | None, hits: list[int]
) -> None:
    pool = make_pool(*groups, hash_block=hash_block, retention_interval=retention)
    assert chat_hits(pool) == hits


def test_a_junction_is_kept_from_the_second_visit_on() -> None:
    pool = make_pool(full(0), window(1, 64))
    run(pool, PROMPT)
    siblings = [PROMPT[:100] + list(range(start, start + 60)) for start in (3000, 4000, 6000)]
    assert [run(pool, sibling) for sibling in siblings] == [0, 96, 96]


def test_an_aligned_prompt_recomputes_its_last_block_and_stores_it_twice() -> None:
    pool = make_pool(full(0))
    assert [run(pool, PROMPT[:64]) for _ in range(3)] == [0, 48, 48]
    last = block_hashes(PROMPT[:64], HashScheme())[-1]
    assert pool.resident(0)[last] == 3


def test_the_last_copy_serves_hits_until_it_goes() -> None:
    pool = make_pool(full(0), blocks=8)
    twins = [pool.request(PROMPT[:48]) for _ in range(2)]
    for twin in twins:
        assert pool.start(twin) == 0
    for twin in twins:
        assert pool.compute(twin, 48)
    for twin in twins:
        pool.finish(twin)
    hashes = block_hashes(PROMPT[:48], HashScheme())
    assert pool.resident(0) == dict.fromkeys(hashes, 2)
    run(pool, PROMPT[100:148])  # takes the one block never used, and the first twin's last two
    assert pool.resident(0)[hashes[-1]] == 1
    assert pool.find_hit(pool.request(PROMPT[:64])) == 48


def test_the_least_recently_freed_tail_goes_first() -> None:
    pool = make_pool(full(0), blocks=8)
    first, second = PROMPT[:48], PROMPT[60:108]
    run(pool, first)
    run(pool, second)
    run(pool, PROMPT[120:152])  # two blocks: the free one and the tail of ``first``
    assert pool.find_hit(pool.request([*first, 1])) == 32
    assert pool.find_hit(pool.request([*second, 1])) == 48
    run(pool, [*first[:32], 1])  # a hit makes ``first`` recent: its new third block takes its own place
    run(pool, PROMPT[130:162])
    assert pool.find_hit(pool.request([*first, 1])) == 32
    assert pool.find_hit(pool.request([*second, 1])) == 16


def test_a_window_gives_its_blocks_back() -> None:
    pool = make_pool(window(0, 32), blocks=100, chunk_tokens_max=64)
    request = pool.request(list(range(1, 641)))
    prefill(pool, request)
    assert pool.num_free_blocks == 99 - 6, "one chunk and the window before it"
    generate(pool, request, range(7000, 7018))
    assert pool.num_free_blocks == 99 - 3
    assert request.tables[0].count(0) == len(request.tables[0]) - 3


def test_events_say_what_was_stored_and_masked() -> None:
    pool = make_pool(full(0), window(1, 64))
    request = pool.request(PROMPT)
    prefill(pool, request)
    dense, masked = pool.take_events()
    hashes = block_hashes(PROMPT, HashScheme())
    assert isinstance(dense, BlockStored)
    assert isinstance(masked, BlockStored)
    assert (dense.block_hashes, dense.parent_block_hash, dense.group_idx) == (hashes, None, 0)
    assert (dense.tokens(), dense.block_size, dense.medium) == (PROMPT[:160], 16, "GPU")
    assert (masked.block_hashes, masked.num_tokens()) == (hashes[-4:], 160)
    assert (masked.kv_cache_spec_kind, masked.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert masked.extra_keys == [None] * 4
    generate(pool, request, range(7000, 7014))
    stored, empty = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert isinstance(empty, BlockStored)
    assert (stored.parent_block_hash, stored.num_tokens()) == (hashes[-1], 16)
    assert (empty.block_hashes, empty.num_tokens(), empty.extra_keys) == ([], 16, None)


def test_extra_keys_are_untagged_and_relative_to_the_block() -> None:
    image = MultimodalItem("image", 10, 30)
    extras = PromptExtras("lora", "/path", "salt", (image,))
    pool = make_pool(full(0), lora_ids={"lora": 7})
    request = pool.request(PROMPT[:64], extras)
    prefill(pool, request)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert (event.lora_id, event.lora_name) == (7, "lora")
    assert event.extra_keys == [
        ("lora", ("image", 10), "salt"),
        ("lora", ("image", -6)),
        ("lora", ("image", -22)),
        ("lora",),
    ]
    assert pool.find_hit(pool.request(PROMPT)) == 0
    assert pool.find_hit(pool.request(PROMPT, extras)) == 64
    prefill(pool, pool.request(PROMPT[:16], PromptExtras("other")))
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.lora_id == 2, "the second adapter, of a number of its own"


def test_a_prompt_end_inside_a_coarse_block_is_stored_and_replaced_when_the_block_fills() -> None:
    pool = make_pool(full(0, 64), mamba(1, "align", 64), hash_block=16)
    request = pool.request(PROMPT[:100])
    prefill(pool, request)
    hashes = block_hashes(PROMPT[:100], HashScheme())
    parts = [e for e in pool.take_events() if isinstance(e, BlockStored) and e.block_size == 16]
    assert {(e.group_idx, *e.block_hashes) for e in parts} == {(0, hashes[5]), (1, hashes[5])}
    assert all(e.parent_block_hash == hashes[4] and e.tokens() == PROMPT[80:96] for e in parts)
    assert pool.find_hit(pool.request(PROMPT)) == 96
    generate(pool, request, range(7000, 7030))
    promoted = [e for e in pool.take_events() if e != AllBlocksCleared()]
    first = next(e for e in promoted if isinstance(e, BlockRemoved))
    assert (first.group_idx, first.block_hashes) == (0, [hashes[5]])
    pool.check_integrity()


@pytest.mark.parametrize(
    ("groups", "tokens", "due"),
    [
        ((full(0, 64), mamba(1, "align", 64)), 100, [(64, 0, 3), (96, 0, 5)]),
        ((full(0, 64), window(1, 32)), 64, [(64, 0, 3)]),
    ],
)
def test_blocks_are_due_once_where_full_or_where_a_hit_can_end_inside_them(
    groups: tuple[GroupSpec, ...], tokens: int, due: list[tuple[int, int, int]]
) -> None:
    pool = make_pool(*groups, hash_block=16)
    request = pool.request(PROMPT[:tokens])
    prefill(pool, request)
    hashes = block_hashes(PROMPT[:tokens], HashScheme())
    assert [(one.end, one.group_idx, hashes.index(one.block_hash)) for one in pool.due(request)] == due
    assert pool.due(request) == []


def test_a_hit_inside_a_block_copies_it_and_the_copy_is_stored_too() -> None:
    pool = make_pool(full(0, 64), mamba(1, "align", 64), hash_block=16)
    run(pool, PROMPT[:100])
    before, last = pool.resident(0), block_hashes(PROMPT[:96], HashScheme())[-1]
    sibling = pool.request([*PROMPT[:97], 1, 2, 3])
    assert prefill(pool, sibling) == 96
    pool.check_integrity()
    assert pool.resident(0) == {h: copies + (h == last) for h, copies in before.items()}
    pool.finish(sibling)
    pool.check_integrity()
    assert pool.usage == 0


@pytest.mark.parametrize(("fresh", "blocks"), [(3, 6), (31, 6), (32, 8)])
def test_a_hit_inside_a_block_waits_for_room_for_its_copy(fresh: int, blocks: int) -> None:
    """Up to 128 tokens each group needs a copy of its second block beside those of the hit (three, without
    the first state), and for one token more another block."""
    text = [*PROMPT[:97], *range(1, fresh + 1)]
    fits = []
    for size in range(5, 12):
        pool = make_pool(full(0, 64), mamba(1, "align", 64), hash_block=16, blocks=size)
        run(pool, PROMPT[:100])
        fits.append(pool.start(pool.request(text)) is not None)
    assert (fits, 5 + fits.index(True)) == (sorted(fits), blocks)


def test_without_room_for_the_copy_of_a_block_nothing_is_computed() -> None:
    pool = make_pool(full(0, 64), mamba(1, "align", 64), hash_block=16)
    run(pool, PROMPT[:100])
    sibling = pool.request([*PROMPT[:97], 1, 2, 3])
    assert pool.start(sibling) == 96
    taken = pool._store.take(pool.num_free_blocks - 1)
    assert not pool.compute(sibling, 4)
    pool._store.free(taken[:1])
    assert pool.compute(sibling, 4)


@pytest.mark.parametrize(
    ("group", "quiet_to"), [(full(0), 175), (window(0, 40), 167), (window(0, 49), 175), (chunked(0, 56), 168)]
)
def test_decoding_costs_nothing_until_a_block_fills_or_falls_out_of_reach(
    group: GroupSpec, quiet_to: int
) -> None:
    pool = make_pool(group)
    request = pool.request(PROMPT)
    prefill(pool, request)
    generate(pool, request, [7, 8])
    assert (request.num_computed, request.quiet_to) == (164, quiet_to)


def test_a_state_stored_in_this_step_makes_the_next_request_wait() -> None:
    pool = make_pool(full(0), mamba(1, "all"))
    first, second = pool.request(PROMPT), pool.request(PROMPT)
    assert pool.start(first) == 0
    assert pool.compute(first, len(PROMPT))
    assert pool.find_hit(second) == 160
    assert pool.start(second) is None
    pool.end_step()
    assert pool.start(second) == 160


def test_chunked_local_alone_hits_a_cold_cache() -> None:
    pool = make_pool(chunked(0, 64))
    assert pool.find_hit(pool.request(PROMPT)) == 128
    assert make_pool(full(0), chunked(1, 64)).find_hit(pool.request(PROMPT)) == 0


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    pool = make_pool(full(0), blocks=10)
    held = pool.request(PROMPT[:64])
    prefill(pool, held)
    other = pool.request(PROMPT[60:160])
    assert pool.start(other) is None
    assert pool.num_free_blocks == 5
    pool.check_integrity()
    pool.finish(held)
    assert pool.start(other) == 0


def test_out_of_blocks_then_preempted_then_resumed() -> None:
    pool = make_pool(full(0), blocks=8)
    one, two = pool.request(PROMPT[:48]), pool.request(PROMPT[60:108])
    prefill(pool, one)
    prefill(pool, two)
    generate(pool, one, range(7000, 7017))
    two.append(1)
    assert not pool.compute(two, 1)
    assert two.num_computed == 48
    pool.preempt(two)
    assert pool.usage == pytest.approx(4 / 7)
    pool.finish(one)
    assert pool.start(two) == 48
    pool.check_integrity()


def test_finish_is_harmless_twice_and_before_the_start() -> None:
    pool = make_pool(full(0))
    request = pool.request(PROMPT)
    pool.finish(request)
    prefill(pool, request)
    pool.finish(request)
    pool.finish(request)
    pool.check_integrity()
    assert (pool.usage, pool.num_free_blocks) == (0, 199)


def test_reset_is_refused_while_blocks_are_in_use() -> None:
    pool = make_pool(full(0), window(1, 64))
    request = pool.request(PROMPT)
    prefill(pool, request)
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == []
    pool.finish(request)
    assert pool.reset()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.resident(0) == {}
    assert pool.find_hit(request) == 0


def test_supplied_hashes_replace_hashing() -> None:
    prompt, answer = PROMPT, list(range(7000, 7040))
    known = block_hashes(prompt + answer, HashScheme())
    own, given, chained = (make_pool(full(0), window(1, 64)) for _ in range(3))
    chain = HashChain(HashScheme())
    chain.extend(prompt)
    results = []
    for pool, hashes in ((own, None), (given, known), (chained, chain.fork(4))):
        request = pool.request(prompt, hashes=hashes)
        prefill(pool, request)
        generate(pool, request, answer)
        pool.finish(request)
        results.append(([pool.resident(idx) for idx in range(2)], pool.take_events()))
    assert results[0] == results[1] == results[2]


def test_supplied_hashes_must_reach_every_block() -> None:
    pool = make_pool(full(0))
    hashes = block_hashes(PROMPT, HashScheme())
    with pytest.raises(ValueError, match="hashes cover 144 tokens of 163"):
        pool.request(PROMPT, hashes=hashes[:-1])
    request = pool.request(PROMPT, hashes=hashes)
    with pytest.raises(ValueError, match="hashes cover 160 tokens of 176"):
        pool.extend(request, range(13))


def test_a_shadow_holds_the_same_and_says_nothing() -> None:
    loud = make_pool(full(0), window(1, 64), blocks=40)
    quiet = make_pool(full(0), window(1, 64), blocks=40, events=False)
    texts = [PROMPT, [*PROMPT[:80], *range(50)], PROMPT, list(range(300)), PROMPT]
    assert [run(loud, text, range(20)) for text in texts] == [run(quiet, text, range(20)) for text in texts]
    assert quiet.take_events() == []
    assert [loud.resident(idx) for idx in range(2)] == [quiet.resident(idx) for idx in range(2)]


def test_raw_hashes_are_the_whole_32_bytes() -> None:
    pool = make_pool(full(0), int_hashes=False)
    run(pool, PROMPT[:40])
    counter = CopyCounter(1)
    counter.apply(pool.take_events())
    assert counter.resident(0) == pool.resident(0)
    assert [int.from_bytes(h[-8:], "big") for h in pool.resident(0) if isinstance(h, bytes)] == block_hashes(
        PROMPT[:40], HashScheme()
    )


def test_misuse_is_refused() -> None:
    pool = make_pool(full(0))
    request = pool.request(PROMPT)
    with pytest.raises(ValueError, match="cannot compute"):
        pool.compute(request, 16)
    prefill(pool, request)
    with pytest.raises(ValueError, match="started already"):
        pool.start(request)
    with pytest.raises(ValueError, match="cannot compute"):
        pool.compute(request, 1)
    with pytest.raises(ValueError, match="at least one token"):
        pool.request([])


def test_integrity_check_notices_a_lost_block() -> None:
    pool = make_pool(full(0))
    request = pool.request(PROMPT)
    prefill(pool, request)
    pool.check_integrity()
    request.tables[0][2] = request.tables[0][1]
    with pytest.raises(IntegrityError, match="reference counts"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("groups", "options", "reason"),
    [
        ((), {}, "at least one group"),
        ((full(1),), {}, "position 0"),
        ((full(0, 24),), {}, "no multiple of hash block 16"),
        ((full(0),), {"hash_block": 0}, "no multiple of hash block 0"),
        ((full(0, 32),), {}, "must equal its block size"),
        ((full(0), GroupSpec(1, "cross_attention", 16)), {}, "no prefix cache"),
        ((full(0), GroupSpec(1, "novel_attention", 16)), {}, "unknown kv_cache_spec_kind"),
        ((full(0), GroupSpec(1, "sliding_window", 16)), {}, "needs sliding_window"),
        ((full(0), GroupSpec(1, "chunked_local_attention", 16)), {}, "needs attention_chunk_size"),
        ((full(0), mamba(1, "none")), {}, "mamba_cache_mode"),
        ((full(0), mamba(1, "align"), mamba(2, "all")), {}, "different modes"),
        ((full(0, 32), chunked(1, 64)), {}, "needs block size 32"),
        ((full(0), window(1, 64)), {"retention_interval": 40}, "no multiple of 16"),
        ((full(0),), {"retention_interval": 64}, "has no effect"),
        ((full(0),), {"blocks": 1}, "at least 2"),
    ],
)
def test_models_vllm_would_not_run_are_refused(
    groups: tuple[GroupSpec, ...], options: dict[str, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_pool(*groups, **options)


def test_lookahead_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="look-ahead"):
        HybridBlockPool((full(0),), num_blocks=10, scheme=HashScheme(lookahead=1))


@pytest.mark.parametrize(
    ("window", "blocks"), [(None, 0), (1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_a_window_needs_the_blocks_of_all_its_tokens_but_the_next(window: int | None, blocks: int) -> None:
    assert window_blocks(GroupSpec(0, "sliding_window", 16, sliding_window=window)) == blocks
