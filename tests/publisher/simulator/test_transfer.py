"""Prefill and decode apart, on two simulated engines over HTTP and a side channel.

What must hold is what was seen on vLLM 0.32 with NixlConnector: who holds blocks until when, what a decode
engine's cache and usage say, and what goes wrong without an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockStored, Event
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.kv_connector import KvConnector, RefusedError, exchange
from kvatlas.publisher.simulator.kv_messages import Read, TransferParams
from kvatlas.publisher.simulator.model import WRONG_MARK, WrongContinuation
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import PRESETS
from tests.publisher.simulator.support import LONG_TEXT, all_blocks_free, engine, request
from tests.support.waiting import run, until

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
ASKED |= dict.fromkeys(("remote_block_ids", "remote_host", "remote_port"))
PROMPT = list(range(5, 329))
"""324 tokens, as measured on real engines."""
SEEN = (GroupSpec(0, "sliding_window", 128, sliding_window=64), GroupSpec(1, "full_attention", 128))
"""A window shorter than a block, as there."""
SHORT_S = 0.02


class Pair(NamedTuple):
    prefill: SimulatedEngine
    decode: SimulatedEngine

    async def leg(self, **changes: Any) -> dict[str, Any]:
        """The prefill leg of a completion, and its answer."""
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": ASKED, **changes}
        status, answer = await request(self.prefill, "POST", "/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    async def answer(self, params: Any, **changes: Any) -> tuple[int, Any]:
        """The decode leg."""
        return await completion(self.decode, kv_transfer_params=params, **changes)


async def completion(running: SimulatedEngine, **changes: Any) -> tuple[int, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **changes}
    return await request(running, "POST", "/v1/completions", body)


@asynccontextmanager
async def split(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(engine(**{"role": "prefill", **both, **(prefill or {})}))
        second = await stack.enter_async_context(engine(**{"role": "decode", **both, **(decode or {})}))
        yield Pair(first, second)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


async def metric(running: SimulatedEngine, name: str) -> float | None:
    _, page = await request(running, "GET", "/metrics")
    found = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
    return float(found[0].rpartition(" ")[2]) if found else None


async def free(running: SimulatedEngine) -> None:
    await until(lambda: all_blocks_free(running))


async def test_the_answer_is_that_of_one_engine_and_the_blocks_are_free_once_they_are_read() -> None:
    async with engine() as alone, split() as pair:
        _, expected = await completion(alone)
        params = (await pair.leg())["kv_transfer_params"]
        assert not all_blocks_free(pair.prefill)
        status, got = await pair.answer(params)
        assert status == 200
        assert got["choices"] == expected["choices"]
        assert got["kv_transfer_params"] is None
        await free(pair.prefill)
        await free(pair.decode)
        assert await metric(pair.decode, "nixl_xfer_time_seconds_count") == 1
        assert 0 <= (await metric(pair.decode, "nixl_xfer_time_seconds_sum") or 0) < 60
        assert await metric(pair.prefill, "nixl_num_notifications_after_expiry_total") is None


async def test_a_prefill_engine_names_its_blocks_with_the_last_of_a_window_only() -> None:
    async with split(prefill={"groups": "gptoss-like", "engine_id": "eng-p"}) as pair:
        params = (await pair.leg())["kv_transfer_params"]
        full, window = params.pop("remote_block_ids")
        assert (len(full), len(window)) == (21, 9)
        assert params.pop("remote_request_id").startswith("cmpl-")
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "eng-p",
            "remote_host": "127.0.0.1",
            "remote_port": params["remote_port"],
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 324,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}, "max_tokens"),
        ("/v1/completions", {"prompt": LONG_TEXT}, "max_tokens"),
        ("/v1/responses", {"input": LONG_TEXT, "model": "kvatlas-demo"}, "max_output_tokens"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": LONG_TEXT}], "model": "kvatlas-demo"},
            "max_tokens",
        ),
        ("/inference/v1/generate", {"token_ids": PROMPT}, "sampling_params"),
    ],
)
async def test_every_api_has_both_legs(path: str, body: dict[str, Any], limit: str) -> None:
    def limited(tokens: int) -> dict[str, Any]:
        return {**body, limit: {"max_tokens": tokens} if limit == "sampling_params" else tokens}

    async with split() as pair:
        asked = {**limited(1), "kv_transfer_params": ASKED}
        status, first = await request(pair.prefill, "POST", path, asked)
        assert status == 200
        params = first["kv_transfer_params"]
        asked = {**limited(5), "kv_transfer_params": params}
        status, second = await request(pair.decode, "POST", path, asked)
        assert status == 200
        assert pair.decode.scheduler.stats.external_prefix_cache_hits == params["remote_num_tokens"]
        assert second.get("kv_transfer_params") is None
        await free(pair.prefill)


@pytest.mark.parametrize(("version", "expected"), [("0.30.1", 324), ("0.31.0", 320), ("0.33.0", 320)])
async def test_usage_of_the_decode_leg_is_the_prefill_engines_hit_but_in_0_30(
    version: str, expected: int
) -> None:
    async with split(version=version, groups="full") as pair:
        await completion(pair.prefill)
        first = await pair.leg()
        assert cached(first) == 320
        _, answer = await pair.answer(first["kv_transfer_params"])
        assert cached(answer) == expected
        _, told = await request(pair.decode, "GET", "/version")
        assert told["version"].startswith(version)


def test_streams_of_a_prefill_leg_carry_parameters_from_0_33_on() -> None:
    async def check(version: str) -> bool:
        async with split(version=version) as pair, aiohttp.ClientSession() as session:
            body = {"prompt": PROMPT, "max_tokens": 1, "stream": True, "kv_transfer_params": ASKED}
            async with session.post(f"{pair.prefill.base_url}/v1/completions", json=body) as answer:
                return b'"remote_registration_generation"' in await answer.read()

    assert not run(check("0.32.0"))
    assert run(check("0.33.0"))


async def test_a_decode_engine_reads_only_what_it_lacks_and_stores_what_a_table_holds() -> None:
    """As measured: with a window shorter than a block the full group alone is stored after a transfer."""

    async with split(groups=SEEN, block_size=128) as pair:
        stored: list[BlockStored] = []
        publish = pair.decode.stepper._publish

        def seen(events: list[Event]) -> None:
            stored.extend(event for event in events if isinstance(event, BlockStored))
            publish(events)

        pair.decode.stepper._publish = seen
        _, answer = await pair.answer((await pair.leg())["kv_transfer_params"], max_tokens=2)
        assert [(event.group_idx, len(event.block_hashes)) for event in stored] == [(1, 2)]
        _, again = await completion(pair.decode, max_tokens=1)
        assert cached(again) == 0, "the window group has nothing, so the model has not"
        _, again = await completion(pair.decode, max_tokens=1)
        assert cached(again) == 256
        params = (await pair.leg())["kv_transfer_params"]
        before = await metric(pair.decode, "nixl_bytes_transferred_sum")
        _, warm = await pair.answer(params, max_tokens=2)
        after = await metric(pair.decode, "nixl_bytes_transferred_sum")
        assert after is not None
        assert before is not None
        assert after - before < before
        assert text(warm) == text(answer)


async def test_a_mamba_model_is_computed_one_token_short_and_the_decode_engine_goes_on_from_there() -> None:
    async with engine(groups="mamba-hybrid") as alone, split(groups="mamba-hybrid") as pair:
        _, expected = await completion(alone)
        params = (await pair.leg())["kv_transfer_params"]
        assert params["remote_num_tokens"] == 323
        _, got = await pair.answer(params)
        assert text(got) == text(expected)
        await free(pair.prefill)


async def test_full_attention_that_is_here_is_not_read_again_where_states_come_anyway() -> None:
    """The decode engine alone has no hit then: a state of the prompt's end is none of a shorter prefix."""

    async with split(groups="mamba-hybrid") as pair:
        stats = pair.decode.scheduler.stats
        _, right = await pair.answer((await pair.leg())["kv_transfer_params"], max_tokens=2)
        assert (stats.external_prefix_cache_hits, stats.prefix_cache_hits) == (323, 0)
        _, again = await pair.answer((await pair.leg())["kv_transfer_params"], max_tokens=2)
        assert text(again) == text(right)
        assert stats.prefix_cache_hits > 200
        assert stats.external_prefix_cache_hits == 323 + 323 - stats.prefix_cache_hits
        _, alone = await completion(pair.decode, max_tokens=1)
        assert cached(alone) == 0
        await free(pair.prefill)
        await free(pair.decode)


async def test_unread_blocks_are_freed_when_the_lease_ends() -> None:
    async with split(prefill={"kv_lease_s": SHORT_S}) as pair:
        await pair.leg()
        await free(pair.prefill)
        assert await metric(pair.prefill, "nixl_num_kv_expired_reqs_total") == 1


async def test_a_late_read_is_right_until_the_blocks_are_reused_and_then_wrong_with_status_200() -> None:
    small = {"kv_lease_s": SHORT_S, "num_blocks": 128}
    async with split(prefill=small, groups="full") as pair:
        params = (await pair.leg())["kv_transfer_params"]
        await free(pair.prefill)
        status, right = await pair.answer(params)
        assert status == 200
        assert WRONG_MARK not in text(right)
        assert await metric(pair.prefill, "nixl_num_notifications_after_expiry_total") == 1
        other = (await pair.leg(prompt=PROMPT[::-1]))["kv_transfer_params"]
        await free(pair.prefill)
        await completion(pair.prefill, prompt=[7] * 1900, max_tokens=1)
        status, wrong = await pair.answer(other, prompt=PROMPT[::-1])
        assert status == 200
        assert WRONG_MARK in text(wrong)
        assert await metric(pair.prefill, "nixl_num_notifications_after_expiry_total") == 2


async def test_a_decode_engine_without_room_says_that_it_still_wants_the_blocks() -> None:
    busy = {"kv_lease_s": 0.06, "max_num_seqs": 1, "decode_s_per_token": 0.01}
    async with split(decode=busy) as pair:
        assert pair.prefill.connector is not None
        renewed: list[str] = []

        def seen(request_ids: list[str]) -> None:
            renewed.extend(request_ids)

        pair.prefill.connector.renew = seen  # type: ignore[method-assign]
        blocking = asyncio.create_task(completion(pair.decode, prompt=[9] * 40, max_tokens=5000))
        await until(lambda: pair.decode.scheduler.gauges().num_running == 1)
        params = (await pair.leg())["kv_transfer_params"]
        waiting = asyncio.create_task(pair.answer(params))
        await until(lambda: len(renewed) > 2)
        assert set(renewed) == {params["remote_request_id"]}
        blocking.cancel()
        status, _ = await waiting
        assert status == 200
        await asyncio.gather(blocking, return_exceptions=True)


def test_a_heartbeat_prolongs_a_lease_to_two_thirds_of_one_from_now() -> None:
    now = [0.0]
    groups = PRESETS["full"](16)
    pool = HybridBlockPool(groups, num_blocks=64, scheme=HashScheme())
    connector = KvConnector(pool, engine_id="p", lease_s=30, release=(0, 32), clock=lambda: now[0])
    asked = TransferParams(do_remote_decode=True)
    done = SimRequest("r", [7] * 40, WrongContinuation([3], 1), max_tokens=1, eos_id=1, transfer=asked)
    pooled = pool.request(done.prompt)
    pool.start(pooled)
    pool.compute(pooled, 40)
    connector.finished(done, pooled, "length")
    pool.finish(pooled)
    assert done.handed is not None
    name = done.handed["remote_request_id"]
    for at, ends in ((0.0, 30.0), (5.0, 30.0), (29.0, 49.0)):
        now[0] = at
        connector.renew([name, "unknown"])
        assert connector.next_deadline_s() == ends
    now[0] = 48.9
    connector.expire()
    assert pool.num_free_blocks == 60
    pool.check_integrity()
    now[0] = 49.0
    connector.expire()
    assert (pool.num_free_blocks, connector.num_kept, connector.stats.kv_expired_reqs) == (63, 0, 1)
    pool.check_integrity()


async def test_parameters_used_twice_are_read_after_their_release() -> None:
    async with split() as pair:
        params = (await pair.leg())["kv_transfer_params"]
        await pair.answer(params)
        status, _ = await pair.answer(params, n=2, temperature=1.0)
        assert status == 200
        assert await metric(pair.prefill, "nixl_num_notifications_after_expiry_total") == 2


async def test_of_two_prompts_only_the_first_is_right_and_the_other_ones_blocks_stay_wrong() -> None:
    """Both prompts get the transfer parameters of the first.

    A later request with the second prompt hits the KV of the first one, unless it has a salt.
    """

    both = [PROMPT, PROMPT[::-1]]
    async with split(groups="full") as pair:
        assert pair.prefill.connector is not None
        params = (await pair.leg(prompt=both))["kv_transfer_params"]
        assert pair.prefill.connector.num_kept == 2
        status, answer = await pair.answer(params, prompt=both)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 2 * len(PROMPT))
        assert [WRONG_MARK in choice["text"] for choice in answer["choices"]] == [False, True]
        status, later = await completion(pair.decode, prompt=PROMPT[::-1])
        assert WRONG_MARK in text(later)
        status, salted = await completion(pair.decode, prompt=PROMPT[::-1], cache_salt="fresh")
        assert WRONG_MARK not in text(salted)
        _, alone = await completion(pair.prefill, prompt=both)
        expected = text(alone), alone["choices"][1]["text"]
        assert (text(answer), text(salted)) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_the_turn_after_a_tool_that_the_engine_runs_fetches_the_first_turns_blocks(
    stream: bool,
) -> None:
    tools = {"own": [{"type": "code_interpreter"}], "client's": [{"type": "function", "name": "f"}]}

    async with split(groups="full") as pair:
        for whose, listed in tools.items():
            body = {"input": LONG_TEXT + whose, "tools": listed, "kv_transfer_params": ASKED}
            asked = {**body, "max_output_tokens": 1}
            _, first = await request(pair.prefill, "POST", "/v1/responses", asked)
            told = {**body, "kv_transfer_params": first["kv_transfer_params"], "max_output_tokens": 5}
            _, answer = await request(pair.decode, "POST", "/v1/responses", {**told, "stream": stream})
            assert (WRONG_MARK in str(answer)) == (whose == "own")
            del told["kv_transfer_params"]
            _, answer = await request(pair.prefill, "POST", "/v1/responses", told)
            assert WRONG_MARK not in str(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "mark"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 50}, '"finish_reason":"abort"'),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50},
            '"finish_reason":"abort"',
        ),
        (
            "/v1/messages",
            {"model": "", "messages": [{"role": "user", "content": "a"}], "max_tokens": 50},
            '"stop_reason":null,"stop_sequence":null}',
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 50}, '"status":"completed"'),
    ],
)
async def test_an_engine_that_is_terminated_answers_200_with_abort(
    path: str, body: dict[str, Any], mark: str, stream: bool
) -> None:
    async with engine(decode_s_per_token=60.0) as running:
        asked = asyncio.ensure_future(request(running, "POST", path, {**body, "stream": stream}))
        await until(lambda: running.scheduler.gauges().num_running == 1)
        await running.stop()
        status, answer = await asked
        assert status == 200
        said = answer if stream else json.dumps(answer, separators=(",", ":"))
        if stream or path != "/v1/messages":
            assert mark in said.replace(": ", ":")
        else:
            assert "stop_reason" not in answer


async def test_several_choices_on_the_prefill_leg_leak_all_but_one() -> None:
    async with split() as pair:
        assert pair.prefill.connector is not None
        answer = await pair.leg(n=3, temperature=1.0)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        await pair.answer(answer["kv_transfer_params"])
        await until(lambda: pair.prefill.connector.num_kept < 3)
        assert pair.prefill.connector.num_kept == 2


@pytest.mark.parametrize("refused", [{"max_tokens": -1}, {"min_tokens": 50}])
async def test_a_decode_leg_that_is_refused_lets_the_blocks_go(refused: dict[str, Any]) -> None:
    async with split() as pair:
        status, _ = await pair.answer((await pair.leg())["kv_transfer_params"], **refused)
        assert status == 400
        await free(pair.prefill)
        assert await metric(pair.prefill, "nixl_num_kv_expired_reqs_total") is None


async def test_a_release_that_does_not_arrive_is_counted() -> None:
    async with split() as pair:
        params = (await pair.leg())["kv_transfer_params"]
        pair.prefill.die()
        assert (await pair.answer(params, max_tokens=-1))[0] == 400
        stats = pair.decode.connector.stats
        await until(lambda: (stats.failed_notifications, stats.failed_transfers) == (1, 1))


async def test_a_client_that_leaves_the_decode_leg_before_its_turn_lets_the_blocks_go() -> None:
    async with split(decode={"max_num_seqs": 1, "decode_s_per_token": 0.01}) as pair:
        blocking = asyncio.create_task(completion(pair.decode, prompt=[9] * 40, max_tokens=5000))
        await until(lambda: pair.decode.scheduler.gauges().num_running == 1)
        params = (await pair.leg())["kv_transfer_params"]
        waiting = asyncio.create_task(pair.answer(params))
        await until(lambda: pair.decode.scheduler.gauges().num_waiting == 1)
        waiting.cancel()
        await free(pair.prefill)
        assert await metric(pair.prefill, "nixl_num_kv_expired_reqs_total") is None
        blocking.cancel()
        await asyncio.gather(blocking, waiting, return_exceptions=True)


@pytest.mark.parametrize(("policy", "expected"), [("fail", 500), ("recompute", 200)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_dead_prefill_engine_fails_the_decode_leg_or_has_it_computed(
    policy: str, expected: int, stream: bool
) -> None:
    async with engine() as alone, split(decode={"kv_load_failure_policy": policy}) as pair:
        params = (await pair.leg())["kv_transfer_params"]
        pair.prefill.die()
        status, answer = await pair.answer(params, stream=stream)
        if stream:
            assert status == 200
            assert ('"Internal server error"' in answer) == (expected == 500)
        else:
            assert status == expected
            if expected == 200:
                assert text(answer) == text((await completion(alone))[1])
        assert await metric(pair.decode, "nixl_num_failed_transfers_total") == 1
        await free(pair.decode)


async def test_engines_of_two_releases_do_not_exchange_blocks() -> None:
    async with split(prefill={"version": "0.31.0"}, decode={"version": "0.32.0"}) as pair:
        status, _ = await pair.answer((await pair.leg())["kv_transfer_params"])
        assert status == 500


async def test_an_engine_without_a_connector_ignores_parameters() -> None:
    async with split(prefill={"role": None}) as pair:
        assert (await pair.leg())["kv_transfer_params"] is None
        status, _ = await completion(pair.prefill, kv_transfer_params={"do_remote_prefill": True})
        assert status == 200


async def test_beam_search_takes_no_part() -> None:
    async with split() as pair:
        assert (await pair.leg(use_beam_search=True))["kv_transfer_params"] is None
        assert all_blocks_free(pair.prefill)


async def test_parameters_without_blocks_end_the_engine() -> None:
    async with engine(role="both") as running:
        status, _ = await completion(running, kv_transfer_params={"do_remote_prefill": True})
        assert status == 500
        await gone(running)


async def test_parameters_without_an_address_hang_and_end_the_engine_when_their_client_leaves() -> None:
    async with engine(role="both") as running:
        params = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
        waiting = asyncio.create_task(completion(running, kv_transfer_params=params))
        await until(lambda: running.scheduler.gauges().num_waiting == 1)
        status, _ = await completion(running, prompt=[9] * 40)
        assert status == 200, "others go on until then"
        waiting.cancel()
        await gone(running)
        await asyncio.gather(waiting, return_exceptions=True)


async def gone(running: SimulatedEngine) -> None:
    """The engine's port is closed."""

    async def refuses() -> bool:
        try:
            await request(running, "GET", "/health")
        except aiohttp.ClientError:
            return True
        return False

    await until(refuses)


@pytest.mark.parametrize("at", ["before_answer", "after_answer"])
async def test_a_prefill_engine_dies_at_the_given_step(at: str) -> None:
    async with split(prefill={"dies_at": at}) as pair:
        if at == "before_answer":
            with pytest.raises(aiohttp.ClientError):
                await pair.leg()
        else:
            params = (await pair.leg())["kv_transfer_params"]
            status, _ = await pair.answer(params)
            assert status == 500
        await gone(pair.prefill)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_dies_behind_the_first_byte(stream: bool) -> None:
    async with split() as pair, aiohttp.ClientSession() as session:
        params = (await pair.leg())["kv_transfer_params"]
        pair.decode.crash_switch.at = "after_first_byte"
        body = {"prompt": PROMPT, "stream": stream, "kv_transfer_params": params}
        async with session.post(f"{pair.decode.base_url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert await answer.content.readany()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        await gone(pair.decode)


async def test_messages_that_are_none_do_not_disturb_the_side_channel() -> None:
    async with split() as pair:
        params = (await pair.leg())["kv_transfer_params"]
        for junk in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}", b"\x00"):
            reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
            writer.write(junk)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        status, _ = await pair.answer(json.loads(json.dumps(params)))
        assert status == 200


async def test_a_read_of_a_request_that_is_not_known_is_refused_and_gives_no_wrong_text() -> None:
    # As after a restart during the transfer: the engine has none of the blocks.
    async with split() as pair:
        params = (await pair.leg())["kv_transfer_params"]
        address = params["remote_host"], params["remote_port"]
        with pytest.raises(RefusedError, match="unknown request"):
            await exchange(address, Read("never-computed", end=16, digest=1))
        await exchange(address, Read("never-computed"))
        status, right = await pair.answer(params)
        assert status == 200
        assert WRONG_MARK not in text(right)
