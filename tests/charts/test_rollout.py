"""A rollout of all engines behind a router with what the chart renders."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.charts.chart import Rendered
from tests.router.serve.cluster import cluster
from tests.support.waiting import run_real, until


@pytest.mark.process
@pytest.mark.timeout(180)
def test_with_the_charts_drain_answers_that_last_longer_leave_their_engines() -> None:
    """Answers take twice as long as the drain."""
    drain = {"seconds": 5, "gracePeriodSeconds": 30}
    values = {"engines": {"selector": {"app": "vllm"}, "namespaces": ["serving"], "drain": drain}}
    config = Rendered(values).config
    kubernetes = config["fleet"]["kubernetes"]
    assert (kubernetes["selector"], kubernetes["namespaces"]) == ("app=vllm", ["serving"])  # as the cluster's
    settings = [f"proxy.{key}={value}" for key, value in config["proxy"].items()]

    async def main() -> None:
        async with cluster("", *settings) as c:
            c.engine, c.grace_s = {"decode_s_per_token": 0.05}, float(drain["gracePeriodSeconds"])
            c.load.lengths = (5, 200, 200)
            await asyncio.gather(*(c.add_engine() for _ in range(2)))
            router = await c.add_router()
            c.load.start(users=6)
            await c.load.more(6)
            for old in list(c.pods):
                new = await c.add_engine()

                async def known(url: str = new.url) -> bool:
                    engine = (await c.knows(router)).get(url, {})
                    return (engine.get("feed_state"), engine.get("on_hold")) == ("ready", "")

                await until(known, f"{new.name} is known")
                await c.end_engine(old)
                assert c.load.failed == c.load.cut == []
            await c.load.stop()
            assert c.load.failed == c.load.cut == []
            page = str(await c.ask(f"{router.ops_url}/metrics"))
            moved = re.findall(r'stream_moves_total\{outcome="(?:warmed|cold)"\} (\d+)', page)
            assert sum(map(int, moved)) > 0

    run_real(main(), 170)
