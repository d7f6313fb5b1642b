"""A Redis in memory: data, scripts, expiry on virtual time, restarts."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.world.loop import VirtualLoop
from tests.world.redis_server import RedisServer
from tests.world.seams import run_with


@pytest.mark.parametrize("empty", [True, False])
def test_scripts_expiry_and_restarts(*, empty: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        server = RedisServer(("10.2.0.1", 6379))
        await server.start()
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            script = "redis.call('SET', KEYS[1], ARGV[1], 'EX', 60) return redis.call('TIME')[1]"
            seconds = await client.eval(script, 1, "key", "value")  # type: ignore[misc]
            assert await client.get("key") == b"value"
            await asyncio.sleep(61)
            assert await client.get("key") is None
            assert int((await client.time())[0]) - int(seconds) == 61
            await client.set("kept", "x")
            run_id = (await client.info())["run_id"]
            server.stop()
            with pytest.raises(RedisConnectionError):
                await client.get("kept")
            await server.start(empty=empty)
            assert await client.get("kept") == (None if empty else b"x")
            assert (await client.info())["run_id"] != run_id

    run_with(main)


@pytest.mark.parametrize("frozen_s", [0.0, 1.0])
async def test_a_read_waits_for_an_entry_or_its_time(frozen_s: float) -> None:
    server, loop = RedisServer(("10.2.0.1", 6379)), asyncio.get_running_loop()
    await server.start()
    async with (
        redis.asyncio.Redis.from_url(server.url, protocol=2) as one,
        redis.asyncio.Redis.from_url(server.url, protocol=2) as other,
    ):
        assert await one.xread({"stream": "0-0"}, block=50) == []
        began_s, reading = loop.time(), asyncio.create_task(one.xread({"stream": "0-0"}, block=5000))
        await asyncio.sleep(0.5)
        await other.xadd("stream", {"f": "x"})
        server.frozen = bool(frozen_s)
        await asyncio.sleep(frozen_s)
        server.thaw()
        ((_, ((_, fields),)),) = await reading
        assert fields == {b"f": b"x"}
        assert loop.time() - began_s < 0.5 + frozen_s + 0.2
