"""Routers share what they prove of an engine's salts: one tries a server, the others take it over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.poller import FleetPoller
from kvatlas.router.fleet.salt_proof import TOLD, SaltProof, SaltProver, read_told
from kvatlas.router.fleet.shared_proofs import GossipedProofs
from kvatlas.router.fleet.status import EngineStatus, Fleet
from kvatlas.router.http.client import HttpClient
from kvatlas.router.openai.apis import CHAT
from tests.router.fleet.misbehaving import QUICK, Listener, Server, page
from tests.support.waiting import until

METRICS_PAGE = b"process_start_time_seconds %d.0\n"


class Routers:
    """Pollers of several routers on one server; ``tried``: which of them has tried its salts, in order."""

    def __init__(self, server: Server, client: HttpClient, stack: AsyncExitStack) -> None:
        self.server, self._client, self._stack = server, client, stack
        self.fleets: list[Fleet] = []
        self.proofs: list[GossipedProofs] = []
        self.deaf = False

    def join(self, *, shares: bool = True) -> Fleet:
        """One more router; the first one leads."""
        fleet = Fleet([EngineAddress(self.server.base_url)], EngineStatus)
        fleet.needs_salt_proofs = True
        poller = FleetPoller(fleet, Listener(), QUICK, self._client)
        number = len(self.proofs)
        proofs = GossipedProofs(self._teller(number), poller.salt_proof, lambda: number == 0)
        if shares:
            poller.shared_proofs = proofs
        self.proofs.append(proofs)
        self.fleets.append(fleet)
        task = asyncio.create_task(poller.run())
        self._stack.callback(task.cancel)
        return fleet

    def _teller(self, number: int) -> Callable[[str, bytes], None]:
        def tell(engine_id: str, told: bytes) -> None:
            for at, proofs in enumerate(self.proofs):
                if at != number and not self.deaf:
                    asyncio.get_running_loop().call_soon(proofs.hear, engine_id, told)

        return tell

    async def until_proven(self, *fleets: Fleet) -> None:
        def proven() -> bool:
            engines = [engine for fleet in fleets for engine in fleet]
            return all(one.up and one.salt_proof and one.salt_proof.proven for one in engines)

        await until(proven, "proven")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often salts were tried."""
    times: list[int] = []

    async def prove(_prover: SaltProver, proof: SaltProof) -> None:
        times.append(1)
        await asyncio.sleep(1.0)
        proof.apis, proof.tries, proof.again = {CHAT: Shown("proven")}, proof.tries + 1, False

    monkeypatch.setattr(SaltProver, "prove", prove)
    return times


@asynccontextmanager
async def routers() -> AsyncIterator[Routers]:
    server = Server()
    server.answers["/metrics"] = page(METRICS_PAGE % 1_800_000_000)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.base_url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, HttpClient() as client, AsyncExitStack() as stack:
        yield Routers(server, client, stack)


async def test_a_new_engine_is_tried_once_for_all_routers(tried: list[int]) -> None:
    async with routers() as world:
        fleets = [world.join() for _ in range(3)]
        await world.until_proven(*fleets)
        assert len(tried) == 1


async def test_a_router_that_starts_later_takes_over_what_is_known(tried: list[int]) -> None:
    async with routers() as world:
        await world.until_proven(world.join())
        await world.until_proven(world.join())
        assert len(tried) == 1


async def test_another_process_is_tried_again(tried: list[int]) -> None:
    async with routers() as world:
        first, second = world.join(), world.join()
        await world.until_proven(first, second)
        world.server.answers["/metrics"] = page(METRICS_PAGE % 1_800_000_777)
        await until(lambda: len(tried) == 2, "tried again")
        await world.until_proven(first, second)
        assert [one.salt_proof.started for fleet in (first, second) for one in fleet if one.salt_proof] == [
            1_800_000_777.0
        ] * 2
        assert len(tried) == 2


@pytest.mark.parametrize("why", ["no answer", "no start is stated", "no other router"])
async def test_a_router_that_hears_nothing_tries_it_itself(tried: list[int], why: str) -> None:
    async with routers() as world:
        world.deaf = why == "no answer"
        if why == "no start is stated":
            world.server.answers["/metrics"] = page(b"")
        first, second = world.join(), world.join(shares=why != "no other router")
        await world.until_proven(first, second)
        assert len(tried) == 2


def test_only_a_proof_of_the_same_process_is_taken_over() -> None:
    found = SaltProof({CHAT: Shown("proven")}, tries=1, started=5.0)
    for started, tries, again, takes in (
        (5.0, 0, False, True),
        (5.0, 1, True, True),
        (5.0, 1, False, False),
        (6.0, 0, False, False),
        (None, 0, False, False),
    ):
        mine = SaltProof(tries=tries, again=again, started=started)
        assert mine.hear(found) is takes
        assert bool(mine.proven) is takes
    found.again = True
    for tries, takes in ((0, True), (1, False), (2, False)):
        assert SaltProof(tries=tries, again=True, started=5.0).hear(found) is takes, (
            "no more tries than its own"
        )
    assert not SaltProof(started=5.0).hear(SaltProof(started=5.0)), "not tried yet"


@pytest.mark.parametrize(
    "told", [b"", b"salts", b"salts \xff\xff", TOLD + msgspec.msgpack.encode([1]), TOLD + bytes(20_000)]
)
def test_unreadable_messages_are_refused(told: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_told(told)
    refuted = SaltProof({CHAT: Shown("refuted", "drops it")}, tries=2, started=1.5, again=True)
    assert read_told(refuted.told()) == refuted
