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
