"""SGLang's radix tree: hits, locks and evictions, and that its events tell what is cached."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import SGLANG, HashScheme, PromptExtras, block_hashes
from kvatlas.publisher.block_pool import PoolRequest
from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, to_block_hash
from kvatlas.publisher.pool.radix import RadixPool
from tests.support.event_writer import tokens
from tests.support.examples import examples

PAGE = 4
SCHEME = HashScheme(SGLANG, "", PAGE, tagged=False)


def make_pool(pages: int = 64) -> RadixPool:
    return RadixPool(num_blocks=pages + 1, scheme=SCHEME, chunk_tokens_max=512)


def serve(pool: RadixPool, prompt: list[int], *, salt: str | None = None, decoded: int = 0) -> int:
    """One whole request; returns its hit."""
    request = pool.request(prompt, PromptExtras(cache_salt=salt))
    hit = pool.start(request)
    assert hit is not None
    assert pool.compute(request, request.num_tokens - hit)
    assert pool.next_chunk(request) == 0
    for token in range(decoded):
        request.append(token)
        assert pool.compute(request, 1)
        pool.end_step()
    pool.finish(request)
    pool.check_integrity()
    return hit


def follow(held: set[int], events: list[Event]) -> None:
    """Apply events as a router would; a page is stored at most once."""
    for event in events:
        match event:
            case BlockStored():
                new = [to_block_hash(block) for block in event.block_hashes]
                assert held.isdisjoint(new)
                assert event.num_tokens() == PAGE * len(new)
                parent = event.parent_block_hash
                assert parent is None or to_block_hash(parent) in held
                held.update(new)
            case BlockRemoved():
                gone = [to_block_hash(block) for block in event.block_hashes]
                assert held.issuperset(gone)
                held.difference_update(gone)
            case AllBlocksCleared():
                held.clear()


def test_a_hit_is_the_longest_prefix_of_whole_pages_before_the_last_token() -> None:
    pool, prompt = make_pool(), tokens(18)
    assert serve(pool, prompt) == 0
    assert serve(pool, prompt) == 16
    assert serve(pool, prompt[:16]) == 12, "the last token is computed"
    assert serve(pool, prompt[:10] + [7] * 8) == 8, "inside a node"
    assert serve(pool, prompt, salt="tenant") == 0
    assert serve(pool, prompt, salt="tenant") == 16


def test_decoded_tokens_are_inserted_at_the_end() -> None:
    pool, prompt = make_pool(), tokens(6)
    serve(pool, prompt, decoded=7)
    held: set[int] = set()
    follow(held, pool.take_events())
    whole = [*prompt, *range(7)]
    assert held == set(block_hashes(whole, SCHEME)), "13 tokens have KV, so 12 of them are in whole pages"


def test_events_of_one_chain_are_joined_and_a_split_has_none() -> None:
    pool, prompt = make_pool(), tokens(16)
    request = pool.request(prompt)
    assert pool.start(request) == 0
    for _ in range(2):
        pool.compute(request, 8)
        pool.end_step()
    pool.finish(request)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert (len(event.block_hashes), event.tokens()) == (4, prompt)
    assert serve(pool, [*prompt[:8], 9]) == 8
    assert pool.take_events() == []


def test_unlocked_leaves_go_whole_and_the_least_recently_used_first() -> None:
    pool = make_pool(12)
    first, second = tokens(16, seed=1), tokens(16, seed=2)
    serve(pool, first)
    serve(pool, second)
    serve(pool, [*first[:8], 1])
    pool.take_events()
    serve(pool, tokens(20, seed=3))
    removed = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    wanted = block_hashes(second, SCHEME)
    assert [to_block_hash(block) for event in removed for block in event.block_hashes] == wanted


def test_a_prompt_is_as_recent_as_its_end() -> None:
    pool = make_pool(12)
    first, second = tokens(17, seed=1), tokens(16, seed=2)
    request = pool.request(first)
    assert pool.start(request) == 0
    assert pool.compute(request, 17)
    pool.end_step()
    serve(pool, second)
    pool.finish(request)
    serve(pool, tokens(20, seed=3))
    assert (serve(pool, first), serve(pool, second)) == (16, 0)


@pytest.mark.parametrize(("page", "loaded"), [(5, 10), (4, 0)])
def test_ten_tokens_in_host_memory_are_worth_a_load_and_no_more_leave_it_than_must(
    page: int, loaded: int
) -> None:
    scheme = HashScheme(SGLANG, "", page, tagged=False)
    pool = RadixPool(num_blocks=4, scheme=scheme, chunk_tokens_max=512, host_pages=4)
    first, second, third = (tokens(2 * page + 1, seed=seed) for seed in range(3))
    for prompt in (first, second, third):
        assert serve(pool, prompt) == 0
        pool.take_events()
    kept = [block for prompt in (second, third) for block in block_hashes(prompt[: 2 * page], scheme)]
    assert set(map(to_block_hash, pool.in_host())) == set(kept)
    assert serve(pool, second) == loaded
    pool.take_events()
    assert serve(pool, first) == 0


@pytest.mark.parametrize("leave", [RadixPool.finish, RadixPool.preempt])
def test_pages_in_use_are_not_evicted(leave: Callable[[RadixPool, PoolRequest], None]) -> None:
    pool = make_pool(8)
    request = pool.request(tokens(16, seed=1))
    assert pool.start(request) == 0
    assert pool.compute(request, 16)
    pool.end_step()
    assert pool.usage == pytest.approx(0.5)
    other = pool.request(tokens(20, seed=2))
    assert pool.start(other) is None
    assert not pool.reset()
    leave(pool, request)
    assert pool.start(other) == 0
    assert pool.compute(other, 20)
    pool.finish(other)
    assert pool.reset()
    pool.check_integrity()
    assert isinstance(pool.take_events()[-1], AllBlocksCleared)


def test_full_host_memory_gives_up_what_is_on_the_device_and_stays_there() -> None:
    """Of copies that the device has too, those of leaves go last: leaves are the next to leave the device."""
    pool = RadixPool(
        num_blocks=13, scheme=SCHEME, chunk_tokens_max=512, host_pages=10, write_policy="write_back"
    )
    prompt, other, oldest = tokens(32), tokens(48, seed=1), tokens(12, seed=2)
    for served in (prompt[:16], prompt, other):
        assert serve(pool, served) == (16 if served is prompt else 0)
    assert serve(pool, [*prompt, 1]) == 32, "loaded, for which all of the other prompt is dropped"
    pool.take_events()
    serve(pool, oldest)
    serve(pool, [*prompt, 1])
    pool.take_events()
    serve(pool, tokens(13, seed=3))
    upper, last = block_hashes(prompt[:16], SCHEME), block_hashes(oldest, SCHEME)
    wanted = [
        (BlockRemoved, "CPU_PINNED", upper),
        (BlockStored, "CPU_PINNED", last),
        (BlockRemoved, "GPU", last),
    ]
    told = [event for event in pool.take_events() if not isinstance(event, AllBlocksCleared)][:3]
    assert [(type(e), e.medium, [to_block_hash(b) for b in e.block_hashes]) for e in told] == wanted


@given(st.randoms(use_true_random=False), st.integers(12, 40))
@settings(max_examples=examples(160))
def test_events_tell_what_is_cached_and_hits_are_what_they_tell(rng: random.Random, pages: int) -> None:
    pool, held = make_pool(pages), set[int]()
    live: list[PoolRequest] = []
    for _ in range(60):
        prompt = [rng.choice((1, 2)) for _ in range(rng.randint(1, 24))]
        salt = rng.choice((None, None, "s"))
        request = pool.request(prompt, PromptExtras(cache_salt=salt))
        follow(held, pool.take_events())
        known = block_hashes(prompt[:-1], SCHEME, request.extras)
        wanted = next((n for n, block in enumerate(known) if block not in held), len(known)) * PAGE
        hit = pool.start(request)
        if hit is not None:
            assert hit == wanted
            live.append(request)
        for one in list(live):
            left = one.num_tokens - one.num_computed
            if not left:
                one.append(rng.choice((1, 2)))
                left = 1
            if not pool.compute(one, rng.randint(1, left)) or rng.random() < 0.3:
                (pool.preempt if rng.random() < 0.3 else pool.finish)(one)
                live.remove(one)
        pool.end_step()
        pool.check_integrity()
        if rng.random() < 0.05:
            pool.reset()
    follow(held, pool.take_events())
    assert dict.fromkeys(held, 1) == {to_block_hash(block): n for block, n in pool.resident(0).items()}
