"""An engine that died with a request at one replica: the others know of it before they place that request."""

from __future__ import annotations

import pytest

from tests.router.replication.test_recent_work import Share, both_shares, replicas
from tests.support.redis_servers import Server
from tests.support.waiting import until

pytestmark = pytest.mark.real  # a Redis or Valkey server
DIGEST = b"sixteen bytes...."[:16]


@both_shares
async def test_a_death_at_one_replica_is_known_at_the_others(server: Server, share: Share) -> None:
    async with replicas(server, {}, {}, share=share) as (one, other):
        first, there = one.router.proxy, other.router.proxy
        assert first.deaths is not None
        await other.chat("a prompt, so that the index is asked")
        engine = next(iter(one.router.fleet))

        async def known() -> bool:
            if not there.stats.suspects_learned:
                assert first.deaths is not None
                first.deaths.publish(engine.engine_id, DIGEST)
            await other.chat("another prompt")
            return there.stats.suspects_learned > 0

        await until(known, "the other replica knows")
        assert there.deaths is not None
        suspect = there.deaths.suspects.find(DIGEST, other.router.clock(), 300.0)
        assert suspect is not None
        assert suspect.engine_id == engine.engine_id
        assert first.stats.suspects_learned == 0  # a router does not learn its own statements
