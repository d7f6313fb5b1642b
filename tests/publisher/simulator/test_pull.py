"""Engines that fetch a prefix from another one's host memory: what comes, when, and what does not matter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool.host_tier import HeldKey, HostTier
from kvatlas.publisher.simulator.kv_messages import Fetch
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import PRESETS
from tests.publisher.simulator.support import all_blocks_free, engine, request
from tests.support.ports import free_port
from tests.support.waiting import until

PULLS: dict[str, Any] = {"kv_connector": "offloading", "host_blocks": 4000, "handshake_timeout_s": 0.01}
PROMPT = [5 + number % 240 for number in range(900)]
WHOLE = 896
"""Tokens of the prompt that can be held: whole blocks before its last token."""


class Two(NamedTuple):
    source: SimulatedEngine
    target: SimulatedEngine

    async def ask(
        self, of: SimulatedEngine, prompt: list[int] = PROMPT, source: Any = None, **more: Any
    ) -> tuple[str, int]:
        """Text and cached tokens of a completion; ``source``: of ``remote_kv_source``."""
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
        if source is not None:
            body["kv_transfer_params"] = {"remote_kv_source": source}
        status, answer = await request(of, "POST", "/v1/completions", body)
        assert status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return str(answer["choices"][0]["text"]), int(cached)

    def named(self, **changes: Any) -> dict[str, Any]:
        connector = self.source.connector
        assert connector is not None
        host, port = connector.address
        return {"kv_request_id": "r1", "remote_host": host, "remote_port": port, **changes}


@asynccontextmanager
async def two(
    source: dict[str, Any] | None = None, target: dict[str, Any] | None = None, **both: Any
) -> AsyncIterator[Two]:
    """Two engines, the first of which has computed the prompt."""
    async with (
        engine(**{**PULLS, **both, **(source or {})}) as first,
        engine(**{**PULLS, **both, **(target or {})}) as second,
    ):
        pair = Two(first, second)
        await pair.ask(first)
        yield pair
        await until(lambda: all_blocks_free(second), "nothing is left behind")


@pytest.mark.parametrize("groups", PRESETS)
async def test_a_prefix_comes_and_the_answer_is_that_of_computing(groups: str) -> None:
    async with two(groups=groups) as pair:
        text, cached = await pair.ask(pair.target, source=pair.named())
        assert cached == WHOLE
        assert text == (await pair.ask(pair.source))[0]
        assert pair.target.scheduler.stats.external_prefix_cache_hits == WHOLE
        assert await pair.ask(pair.target) == (text, WHOLE), "and is cached here from then on"


async def test_only_what_is_missing_is_fetched_and_the_rest_is_computed() -> None:
    async with two() as pair:
        sent: list[int] = []
        link: Any = pair.source.link
        answer = link._answer

        async def watched(message: Any) -> Any:
            if isinstance(message, Fetch):
                sent.append(message.num_blocks)
            return await answer(message)

        link._answer = watched
        await pair.ask(pair.target, PROMPT[:400])
        _, cached = await pair.ask(pair.target, [*PROMPT, *range(5, 105)], source=pair.named())
        assert cached == WHOLE
        full = sum(group.sliding_window is None for group in pair.target.groups)
        blocks = (WHOLE - 400) // 16
        windows = (len(pair.target.groups) - full) * 512 // 16
        (fetched,) = sent
        assert blocks * full <= fetched < WHOLE // 16 * full + windows


async def test_parameters_that_are_incomplete_have_no_effect() -> None:
    async with two() as pair:
        for missing in ("kv_request_id", "remote_host", "remote_port"):
            prompt = [*range(5, 15), *PROMPT]
            _, cached = await pair.ask(pair.target, prompt, source=pair.named(**{missing: None}))
            assert cached == (0 if missing == "kv_request_id" else WHOLE)


@pytest.mark.parametrize("gone", ["closed port", "other model", "other groups"])
async def test_a_source_that_is_gone_or_other_costs_the_handshake_and_no_answer(gone: str) -> None:
    others: dict[str, dict[str, Any]] = {"other model": {"model": "m2"}, "other groups": {"block_size": 32}}
    other = others.get(gone, {})

    async with two(source=other) as pair:
        alone = (await pair.ask(pair.target, PROMPT[:450]))[0]
        source = pair.named(**({"remote_port": free_port()} if gone == "closed port" else {}))
        text, cached = await pair.ask(pair.target, source=source)
        assert cached <= 448
        assert alone
        assert text == (await pair.ask(pair.target))[0]


async def test_a_source_that_dies_before_the_blocks_are_sent_costs_no_answer() -> None:
    async with two(transfer_s_per_block=0.05) as pair:
        link: Any = pair.source.link
        asking = asyncio.create_task(pair.ask(pair.target, source=pair.named()))
        await until(link._sending.locked, "blocks are being sent")
        for task in asyncio.all_tasks():
            if task.get_coro().__qualname__ == "TransferLink._serve":  # type: ignore[union-attr]
                task.cancel()
        text, cached = await asking
        assert cached == 0
        assert text == (await pair.ask(pair.source))[0]


async def test_other_requests_go_on_while_a_source_does_not_answer() -> None:
    async with two(target={"handshake_timeout_s": 3600.0}) as pair:
        source = pair.named(remote_port=free_port())
        waiting = asyncio.create_task(pair.ask(pair.target, source=source))
        await until(lambda: pair.target.scheduler.gauges().num_waiting == 1, "it waits")
        await pair.ask(pair.target, PROMPT[100:])
        assert not waiting.done()
        pair.target.stepper.abort_all()
        await asyncio.gather(waiting, return_exceptions=True)
        link: Any = pair.target.link
        request = next(iter(pair.target.scheduler._aborted_loads))
        link._probed(request, frozenset())


async def test_a_source_sends_to_one_engine_after_the_other() -> None:
    async with two(transfer_s_per_block=1e-3) as pair, engine(**PULLS) as third:
        link: Any = pair.source.link
        both = [
            asyncio.create_task(pair.ask(of, source=pair.named(kv_request_id=f"r{number}")))
            for number, of in enumerate((pair.target, third))
        ]
        await until(lambda: link._sending._waiters, "the second waits for the link")
        assert [cached for _, cached in await asyncio.gather(*both)] == [WHOLE, WHOLE]


async def test_a_preempted_request_does_not_wait_for_blocks_that_it_has_fetched() -> None:
    prompts = [PROMPT[60 * number : 60 * number + 500] for number in range(4)]

    async with two(target={"num_blocks": 140, "max_model_len": 1200}, groups="full") as pair:
        for prompt in prompts:
            await pair.ask(pair.source, prompt)
        asked = [
            pair.ask(pair.target, prompt, source=pair.named(kv_request_id=f"r{n}"), max_tokens=600)
            for n, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
        assert pair.target.scheduler.stats.num_preemptions > 0
        assert all(cached > 0 for _, cached in answers)


@given(st.integers(1, 300), st.data())
def test_two_memories_reach_as_far_as_one_that_holds_what_both_hold(tokens: int, data: st.DataObject) -> None:
    groups = (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=40))
    pool = HybridBlockPool(groups, num_blocks=99, scheme=HashScheme(hash_block_size=16))
    one, both = (HostTier(pool.layout, 1000) for _ in range(2))
    asked = pool.request(list(range(tokens)))
    keys = one.missing_keys(asked)
    here = data.draw(st.sets(st.sampled_from(keys))) if keys else set[HeldKey]()
    there = data.draw(st.sets(st.sampled_from(keys))) if keys else set[HeldKey]()
    one.store(sorted(here))
    both.store(sorted(here | there))
    assert one.reach(asked, 0, there) == both.reach(asked, 0)
    assert set(one.missing_keys(asked)) == set(keys) - here
