"""Decode engines that ask for blocks before they are there, as vLLM's Mooncake lets them: who waits, for how
long, and what that holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvatlas.publisher.simulator.kv_protocols import MooncakeLink, _query
from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.publisher.simulator.support import all_blocks_free, engine, request
from tests.support.waiting import until

Pair = tuple[SimulatedEngine, SimulatedEngine]


@asynccontextmanager
async def pair(**both: Any) -> AsyncIterator[Pair]:
    settings = {"kv_connector": "mooncake", "num_blocks": 4000, **both}
    async with (
        engine(role="prefill", bootstrap_port=0, **settings) as p,
        engine(role="decode", **settings) as d,
    ):
        yield p, d


def prompt(number: int) -> list[int]:
    return [number + 5, *range(100, 400)]


async def computes(p: SimulatedEngine, number: int) -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t{number}"}
    body = {"prompt": prompt(number), "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": asked}
    status, answer = await request(p, "POST", "/v1/completions", body)
    assert status == 200, answer


async def fetches(p: SimulatedEngine, d: SimulatedEngine, number: int) -> tuple[int, Any]:
    assert isinstance(p.link, MooncakeLink)
    assert p.connector is not None
    told = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": f"t{number}",
        "remote_engine_id": p.connector.engine_id,
        "remote_bootstrap_addr": f"http://127.0.0.1:{p.link.bootstrap_port}",
    }
    body = {"prompt": prompt(number), "max_tokens": 4, "ignore_eos": True, "kv_transfer_params": told}
    return await request(d, "POST", "/v1/completions", body)


def waiting(d: SimulatedEngine) -> int:
    return d.scheduler.gauges().num_waiting


async def test_a_decode_engine_may_ask_before_the_prompt_is_computed() -> None:
    async with engine() as alone, pair() as (p, d):
        body = {"prompt": prompt(1), "max_tokens": 4, "ignore_eos": True}
        _, expected = await request(alone, "POST", "/v1/completions", body)
        early = asyncio.create_task(fetches(p, d, 1))
        await until(lambda: waiting(d) == 1, "it waits for the blocks")
        await computes(p, 1)
        status, got = await early
        assert (status, got["choices"]) == (200, expected["choices"])
        await until(lambda: all_blocks_free(p) and all_blocks_free(d), "nothing is kept")


async def test_a_wait_without_result_keeps_its_blocks_until_the_prompt_is_computed() -> None:
    async with pair() as (p, d):
        early = asyncio.create_task(fetches(p, d, 1))
        await until(lambda: waiting(d) == 1, "it waits for the blocks")
        early.cancel()
        await until(lambda: waiting(d) == 0, "the engine knows that its client has left")
        assert not all_blocks_free(d)
        await computes(p, 1)
        await until(lambda: all_blocks_free(p) and all_blocks_free(d), "the load has ended")
        await asyncio.gather(early, return_exceptions=True)


async def test_or_until_its_time_is_over() -> None:
    async with pair(kv_lease_s=0.3) as (p, d):
        early = asyncio.create_task(fetches(p, d, 1))
        await until(lambda: waiting(d) == 1, "it waits for the blocks")
        early.cancel()
        await until(lambda: waiting(d) == 0, "the engine knows that its client has left")
        await until(lambda: all_blocks_free(d), "it has given up")
        await asyncio.gather(early, return_exceptions=True)


async def test_a_wait_without_result_blocks_others() -> None:
    """A prompt that is there is not fetched while every sender waits for one that is not."""

    async with pair() as (p, d):
        early = [asyncio.create_task(fetches(p, d, number)) for number in range(MooncakeLink.senders)]
        await until(lambda: waiting(d) == len(early), "all senders are taken")
        assert isinstance(p.link, MooncakeLink)
        link = p.link
        await until(lambda: link.busy, "and know it")
        await computes(p, 100)
        last = asyncio.create_task(fetches(p, d, 100))
        await until(lambda: waiting(d) == len(early) + 1, "it waits too")
        await computes(p, 0)
        assert (await last)[0] == 200, "one sender was free again"
        assert [one.done() for one in early[1:]] == [False] * (len(early) - 1)
        await asyncio.gather(*(computes(p, number) for number in range(1, len(early))))
        assert {status for status, _ in await asyncio.gather(*early)} == {200}


async def test_a_bootstrap_page_may_come_in_pieces() -> None:
    page = b'{"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://10.0.0.1:5710"}}}}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (b"HTTP/1.1 200 OK\r\n\r\n", page[:20], page[20:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)  # a segment of its own
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await _query(f"http://127.0.0.1:{port}") == {"e": ("10.0.0.1", 5710)}
    server.close()
