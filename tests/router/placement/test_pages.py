"""Pages of an engine: what prompts take, how long they wait for room, what the engine's gauge corrects."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.placement.pages import PageAccount, prompt_pages
from kvatlas.router.placement.rates import FleetRates, RateSettings
from tests.support.examples import examples

FULL = (GroupSpec(0, "full_attention", 16),)
HYBRID = (*FULL, GroupSpec(1, "sliding_window", 16, sliding_window=64))
MAMBA = (*FULL, GroupSpec(1, "mamba", 16, mamba_cache_mode="align"))


def pages(blocks: int = 1000, groups: tuple[GroupSpec, ...] = FULL) -> PageAccount:
    account = PageAccount()
    account.configure(blocks, groups)
    return account


def load_account(blocks: int = 1000) -> LoadAccount:
    load = LoadAccount(FleetRates(RateSettings(prefill_s_per_token=0.001)).engine())
    load.pages.configure(blocks, FULL)
    return load


@pytest.mark.parametrize(
    ("groups", "tokens", "count"),
    [
        (FULL, 1600, 100),
        (FULL, 1601, 101),
        (HYBRID, 1600, 105),
        (HYBRID, 32, 4),
        (MAMBA, 1600, 102),
        (MAMBA, 16, 2),
    ],
)
def test_pages_of_a_prompt(groups: tuple[GroupSpec, ...], tokens: int, count: int) -> None:
    assert prompt_pages(groups, tokens) == count


@given(st.sampled_from([FULL, HYBRID, MAMBA]), st.integers(1, 700))
def test_the_block_pool_holds_as_many_for_a_computed_prompt(
    groups: tuple[GroupSpec, ...], tokens: int
) -> None:
    pool = HybridBlockPool(
        groups, num_blocks=500, scheme=HashScheme(hash_block_size=16), chunk_tokens_max=16, events=False
    )
    free = pool.num_free_blocks
    request = pool.request(list(range(tokens)))
    assert pool.start(request, 16) == 0
    while request.num_computed < request.num_tokens:
        assert pool.compute(request, pool.next_chunk(request, 16))
        pool.end_step()
    held = free - pool.num_free_blocks
    assert abs(prompt_pages(groups, tokens) - held) <= len(groups)


def test_a_prompt_waits_for_what_the_others_release() -> None:
    account = pages(blocks=100)
    for _ in range(2):
        account.admit(50)
        account.start(50)
    assert account.surely_fits_tokens < 160
    assert account.wait_s(160) == 0  # nothing has ended: how long it takes is not known
    account.end(50, 8.0, now=10.0)
    assert account.surely_fits_tokens >= 160
    assert account.wait_s(160) == 0
    account.admit(50)
    assert account.wait_s(160) == pytest.approx(10 * 8.0 / 100)


def test_where_nothing_is_released_for_long_littles_law_tells_the_wait() -> None:
    account = pages(blocks=100)
    for _ in range(3):
        account.admit(50)
    for _ in range(2):
        account.start(50)
    for now in (10.0, 110.0, 210.0):
        account.end(0, 8.0, now)
    assert 0 < account.wait_s(160) < 100


def test_the_rate_of_release_is_measured_while_prompts_wait() -> None:
    account, now = pages(blocks=100), 0.0
    for _ in range(20):
        account.admit(40)  # two fit, so a fifth of the pool is useless
    for _ in range(2):
        account.start(40)
    for _ in range(10):
        now += 4.0
        account.end(40, 8.0, now)
        account.start(40)
    # 10 left there take 400 pages; 10 pages a second come free, and Little's law says 12.5.
    assert account.wait_s(16 * 40) == pytest.approx((400 + 40 - 100) / 10)


def test_a_pool_that_is_full_to_the_last_page_lets_nothing_wait() -> None:
    """So its releases say nothing of the highest rate: Little's law still tells the wait."""
    account, now = pages(blocks=100), 0.0
    for _ in range(2):
        account.admit(50)
        account.start(50)
    for _ in range(4):
        assert account.free == 0
        account.end(50, 8.0, now := now + 40.0)
        account.admit(50)
        account.start(50)
    assert account.wait_s(160) == pytest.approx(10 * 8.0 / 100)


def test_usage_tells_shared_pages_and_those_of_other_clients() -> None:
    account = pages(blocks=1000)
    for _ in range(10):
        account.admit(100)
        account.start(100)
    assert account.free == 0
    for _ in range(100):
        account.report(0.3)  # ten sessions with one system prompt
    assert account.free == pytest.approx(700, abs=1)
    account.report(0.9)
    assert account.free < 700
    alone = pages(blocks=1000)
    alone.report(0.8)
    assert alone.free == pytest.approx(200)


def test_without_pool_size_or_layout_there_is_no_wait() -> None:
    for account in (PageAccount(), pages(blocks=0), pages(groups=())):
        account.admit(10_000)
        account.start(10_000)
        account.end(0, 5.0, now=1.0)
        assert account.free == math.inf
        assert account.surely_fits_tokens == math.inf
        assert account.wait_s(1_000_000) == 0


def test_the_load_account_enters_every_request_once() -> None:
    load = load_account(blocks=100)
    first = load.admit(uncached_tokens=800, now=0.0, prompt_tokens=800)
    second = load.admit(uncached_tokens=800, now=0.0, prompt_tokens=800)
    assert load.pages.free == 0
    load.first_token(first, 0.8)
    load.finish(first, 8.8)
    load.finish(first, 9.0)
    assert load.pages.free == 50
    load.fail(second, 9.0)
    held = load.reserve(9.0, 160)
    assert load.pages.free == 90
    load.finish(held, 10.0)
    assert load.pages.free == 100
    assert not load.check_integrity()


def test_a_full_pool_is_a_queue_although_nothing_is_to_be_computed() -> None:
    load, now = load_account(blocks=100), 0.0
    for _ in range(3):
        done = load.admit(uncached_tokens=10, now=now, prompt_tokens=800)
        load.first_token(done, now + 0.01)
        load.finish(done, now := now + 8.0)
    for _ in range(2):
        load.first_token(load.admit(uncached_tokens=10, now=now, prompt_tokens=800), now + 0.01)
    assert load.current(now + 0.02).queue_s == 0.0, "full to the last page"
    load.first_token(load.admit(uncached_tokens=10, now=now, prompt_tokens=800), now + 0.01)
    assert load.current(now + 0.02).queue_s > 1.0


@given(st.lists(st.tuples(st.sampled_from("asefu"), st.integers(1, 2000)), max_size=60))
@settings(max_examples=examples(200))
def test_pages_add_up_whatever_happens(steps: list[tuple[str, int]]) -> None:
    load, now = load_account(), 0.0
    open_tickets = []
    for kind, number in steps:
        now += number / 1000
        if kind == "a":
            open_tickets.append(load.admit(uncached_tokens=number, now=now, prompt_tokens=number))
        elif kind == "s" and open_tickets:
            load.first_token(open_tickets[number % len(open_tickets)], now)
        elif kind == "e" and open_tickets:
            load.finish(open_tickets.pop(number % len(open_tickets)), now)
        elif kind == "u":
            load.report(running=number % 7, waiting=number % 5, now=now, usage=number / 2000)
        elif open_tickets:
            load.fail(open_tickets.pop(), now)
        assert not load.check_integrity()
        assert load.pages.wait_s(100) >= 0
        assert number > load.pages.surely_fits_tokens or load.pages.wait_s(number) == 0
    for ticket in open_tickets:
        load.finish(ticket, now)
    assert not load.check_integrity()
