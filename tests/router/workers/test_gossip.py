"""Workers tell each other of their requests over real sockets: load, prompts in flight, texts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvatlas.publisher.events import BlockHash
from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.key_file import KeyFile
from kvatlas.router.admission.others_use import SILENCE_S
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.placement.candidate import PullSettings
from kvatlas.router.placement.engine import PromptView
from kvatlas.router.placement.others import NO_OTHERS, OthersLoad, others_at
from kvatlas.router.placement.pull import link_busy_s, occupy_links
from kvatlas.router.placement.snapshot import candidates
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.gossip import SiblingGossip
from tests.support.waiting import until

pytestmark = pytest.mark.real  # socket pairs between processes

E = "http://e"
KEYS = f"""
[tenants.ada]
requests_per_minute = 2
concurrent_requests = 1
[[keys]]
tenant = "ada"
sha256 = "{hashlib.sha256(b"kva-ada").hexdigest()}"
"""
FIELDS = [(b"authorization", b"Bearer kva-ada")]
HASHES = [BlockHash(value) for value in (11, 12, 1 << 63, 14)]


@contextmanager
def seats(count: int) -> Iterator[list[WorkerContext]]:
    """Places with nothing but the sockets between them."""
    pairs = {}
    for pair in itertools.combinations(range(count), 2):
        pairs[pair] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in pairs[pair]:
            sock.setblocking(False)
    unused = socket.socket()
    try:
        yield [
            WorkerContext(
                slot,
                count,
                life=0,
                public=[],
                ops=None,
                admin=None,
                control=unused,
                mesh={a + b - slot: ends[slot != a] for (a, b), ends in pairs.items() if slot in (a, b)},
                folder=Path(os.devnull),
                counters_fd=-1,
                ops_at="",
                started=lambda: None,
                parent=-1,
            )
            for slot in range(count)
        ]
    finally:
        for sock in [unused, *itertools.chain(*pairs.values())]:
            sock.close()


@asynccontextmanager
async def running(gossip: SiblingGossip) -> AsyncIterator[None]:
    task = asyncio.create_task(gossip.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Worker:
    """One worker's gossip, and its load."""

    def __init__(
        self, worker: WorkerContext, life: int = 0, gate: KeyGate | None = None, *, whole: bool = True
    ) -> None:
        self.load: dict[str, OthersLoad] = {}
        self.served: list[str] = []
        place = {name: getattr(worker, name) for name in worker.__struct_fields__}
        self.gossip = SiblingGossip(
            WorkerContext(**{**place, "life": life}),
            lambda now: self.load,
            clock=time.monotonic,
            whole=whole,
            served=lambda prompt: self.served.append(prompt.engine_id),
            gate=gate,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Worker]:
        async with running(self.gossip):
            yield self

    def sees(self) -> dict[str, OthersLoad]:
        return dict(self.gossip.peer_state().load)


async def test_siblings_see_each_others_load_and_add_it_up() -> None:
    with seats(3) as places:
        one, two, three = (Worker(place) for place in places)
        async with one.running(), two.running(), three.running():
            one.load = {E: OthersLoad(1, 2, 300)}
            two.load = {E: OthersLoad(3, 0, 0), "http://f": OthersLoad(1, 0, 0)}
            both = {E: OthersLoad(4, 2, 300), "http://f": OthersLoad(1, 0, 0)}
            await until(lambda: three.gossip.others() == both, "the third sees both")
            assert three.sees() == both
            one.load = two.load = {}
            await until(lambda: not three.gossip.others(), "the load is gone")


async def test_gauges_that_show_a_siblings_requests_count_them_once() -> None:
    with seats(2) as places:
        router, sibling = Router(Config(engines=(EngineAddress(E),)), worker=places[0]), Worker(places[1])
        assert router.peers.gossip is not None
        async with sibling.running(), running(router.peers.gossip):
            sibling.load = {E: OthersLoad(3, 0, 0)}
            gossip = router.peers.gossip
            await until(lambda: gossip.others() == sibling.load, "it is reported")
            (engine,) = router.fleet
            router.lifecycle.engine_load(engine, running=4, waiting=0)  # one of another client
            now = router.clock()
            rate = engine.rates.prefill_s_per_token(now)
            assert engine.load.ahead(now, gossip.others()[E], rate)[1] == 4
            assert engine.load.ahead(now, NO_OTHERS, rate)[1] == 1  # when the sibling's have ended


async def test_recent_work_of_a_sibling_counts_where_a_prompt_is_placed() -> None:
    with seats(2) as places:
        config = Config(engines=(EngineAddress(E),))
        one, two = (Router(config, worker=place) for place in places)
        gossips = [router.peers.gossip for router in (one, two)]
        assert gossips[0] is not None and gossips[1] is not None  # noqa: PT018
        hearing = gossips[1]
        async with running(gossips[0]), running(hearing):
            (engine,), (mirrored,) = one.fleet, two.fleet
            now = one.clock()
            work = round(8.0 / engine.rates.prefill_s_per_token(now))
            engine.load.finish(engine.load.admit(uncached_tokens=work, now=now), now)
            await until(lambda: E in hearing.others(), "it is reported")
            assert hearing.others()[E].in_flight == (0, 0, 0)
            asked = PromptView(1000, others=hearing.peer_state().load)
            (candidate,) = candidates([mirrored], asked, two.clock())
            assert 1.0 < candidate.recent_s <= 8.05
            assert candidate.queue_s == 0.0
            assert two.peers.own_load(two.clock()) == {}


async def test_a_link_that_a_sibling_s_pull_uses_is_waited_for() -> None:
    with seats(2) as places:
        config = Config(
            engines=(EngineAddress(E), EngineAddress("http://f")), pull=PullSettings(enabled=True)
        )
        one, two = (Router(config, worker=place) for place in places)
        gossips = [router.peers.gossip for router in (one, two)]
        assert gossips[0] is not None and gossips[1] is not None  # noqa: PT018
        hearing = gossips[1]
        async with running(gossips[0]), running(hearing):
            target, source = one.fleet
            occupy_links(target.load, source.load, 80.0, one.clock())
            await until(lambda: len(hearing.others()) == 2, "both ends are reported")
            now, others = two.clock(), two.peers.others()
            assert all(link_busy_s(end.load, None, now) == 0.0 for end in two.fleet)
            assert all(
                link_busy_s(end.load, others_at(end.engine_id, others), now) > 60.0 for end in two.fleet
            )


async def test_a_prompt_in_flight_and_a_text_are_known_at_the_sibling() -> None:
    with seats(2) as places:
        one, two = (Worker(place) for place in places)
        async with one.running(), two.running():
            prompt = one.gossip.inflight.add(E, HASHES, time.monotonic(), keeps=(range(2, 5, 2),))
            one.gossip.affinity.record([7, 1 << 63], E)
            await until(lambda: two.gossip.stats.received >= 2, "heard")
            common = two.gossip.inflight.common(HASHES, time.monotonic())
            assert (common.blocks, common.coming) == ({E: 4}, {E: 4})
            assert two.gossip.affinity.match([7, 1 << 63, 9]) == {E: 2}
            assert two.served == []
            one.gossip.inflight.end(prompt, time.monotonic())
            await until(lambda: two.served == [E], "the engine has computed it")
            heard = two.gossip.stats.received
            assert two.gossip.delays.buckets()[-1][1] == heard
            assert (one.gossip.stats.missed, two.gossip.stats.malformed) == (0, 0)


async def test_a_long_text_is_known_whole_here_and_as_far_as_a_message_goes_at_the_sibling() -> None:
    with seats(2) as places:
        one, two = (Worker(place) for place in places)
        async with one.running(), two.running():
            keys = list(range(1, 5001))
            one.gossip.affinity.record(keys, E)
            assert one.gossip.affinity.match(keys) == {E: 5000}
            await until(lambda: two.gossip.affinity.match(keys), "heard")
            assert two.gossip.affinity.match(keys) == {E: 4096}
            assert two.gossip.stats.sent == 1  # what is heard is not told again


async def test_beside_a_shared_index_siblings_exchange_no_load_prompts_and_texts() -> None:
    with seats(2) as places:
        one, two = (Worker(place, whole=False) for place in places)
        one.load = {E: OthersLoad(1, 2, 300)}
        async with one.running(), two.running():
            one.gossip.inflight.add(E, HASHES, time.monotonic())
            one.gossip.affinity.record([7], E)
            for _ in range(3):
                one.gossip._flush()
            await until(lambda: two.gossip.stats.received, "that it is there")
            assert (one.gossip.stats.sent, two.gossip.others()) == (1, {})
            assert two.gossip.inflight.stats.prompts == 0
            assert two.gossip.affinity.match([7]) == {}


async def test_messages_of_a_dead_worker_end_with_its_successors_first() -> None:
    with seats(2) as places:
        one, two = Worker(places[0]), Worker(places[1])
        async with two.running():
            async with one.running():
                one.load = {E: OthersLoad(1, 1, 100)}
                one.gossip.inflight.add(E, HASHES, time.monotonic())
                await until(lambda: two.gossip.others() and two.gossip.inflight.stats.prompts, "it is known")
            async with Worker(places[0], life=1).running():
                await until(lambda: not two.gossip.inflight.stats.prompts, "its prompts are gone")
                assert two.gossip.others() == {}


async def test_a_sibling_that_does_not_read_costs_messages_and_no_time() -> None:
    with seats(2) as places:
        one = Worker(places[0])  # no reader at the other end
        async with one.running():
            long = [BlockHash(number) for number in range(8000)]
            for _ in range(64):
                one.gossip.inflight.add(E, long, time.monotonic())
            assert one.gossip.stats.missed > 0
            assert one.gossip.stats.sent > one.gossip.stats.missed


@pytest.mark.parametrize("message", [b"\xc1", b"\x91\x01", b"x" * 1000])
async def test_a_message_that_cannot_be_read_is_counted(message: bytes) -> None:
    with seats(2) as places:
        two = Worker(places[1])
        async with two.running():
            places[0].mesh[1].send(message)
            await until(lambda: two.gossip.stats.malformed == 1, "counted")
            assert two.gossip.others() == {}


async def test_limits_of_a_tenant_hold_for_all_workers_together(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)

    with seats(2) as places:
        gates = [
            KeyGate(KeyFile(tmp_path / "keys", clock=time.monotonic), clock=time.monotonic) for _ in "ab"
        ]
        one, two = (Worker(place, gate=gate) for place, gate in zip(places, gates, strict=True))
        async with one.running(), two.running():
            entry = gates[0].enter(gates[0].tenant_of(FIELDS))
            await until(gates[1].tenants, "the other has heard")
            with pytest.raises(ApiError, match="concurrent"):
                gates[1].enter(gates[1].tenant_of(FIELDS))
            entry.leave(None)
            heard = two.gossip.stats.received
            await until(lambda: two.gossip.stats.received > heard, "it learns that the request left")
            gates[1].enter(gates[1].tenant_of(FIELDS)).leave(None)
            with pytest.raises(ApiError, match="requests_per_minute"):  # two were let in, one each
                gates[1].enter(gates[1].tenant_of(FIELDS))


def gate_of(folder: Path, rules: str) -> KeyGate:
    path = folder / "keys"
    path.write_text(KEYS.replace("requests_per_minute = 2\nconcurrent_requests = 1", rules))
    return KeyGate(KeyFile(path, clock=time.monotonic), clock=time.monotonic)


def lets_in(gate: KeyGate) -> bool:
    try:
        gate.enter(gate.tenant_of(FIELDS)).leave(None)
    except ApiError:
        return False
    return True


async def test_a_lost_message_on_what_a_tenant_uses_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    """The sibling reads nothing until its buffer has overflowed: of all messages the last ones are lost."""

    with seats(2) as places:
        gates = [gate_of(tmp_path, "concurrent_requests = 1") for _ in "ab"]
        one, two = (Worker(place, gate=gate) for place, gate in zip(places, gates, strict=True))
        async with one.running():
            entry = gates[0].enter(gates[0].tenant_of(FIELDS))
            await until(lambda: one.gossip.stats.sent > 1, "the sibling would know of it")
            with contextlib.suppress(BlockingIOError):
                while True:
                    places[0].mesh[1].send(b"\x90")
            missed = one.gossip.stats.missed
            entry.leave(None)
            await until(lambda: one.gossip.stats.missed > missed, "what says that it left is lost")
            async with two.running():
                await until(lambda: lets_in(gates[1]), "the place is free for the sibling")


async def test_a_replaced_worker_finds_limits_as_far_used_as_its_siblings_do(tmp_path: Path) -> None:
    with seats(2) as places:
        gates = [gate_of(tmp_path, "requests_per_minute = 3\nconcurrent_requests = 2") for _ in "abc"]
        one = Worker(places[0], gate=gates[0])
        async with one.running():
            async with Worker(places[1], gate=gates[1]).running():
                assert lets_in(gates[1])
                held = (
                    gates[0].enter(gates[0].tenant_of(FIELDS)),
                    gates[0].enter(gates[0].tenant_of(FIELDS)),
                )
                ada = gates[0].account("ada")
                await until(lambda: ada.headers(time.monotonic())[1][1] == b"0", "the one knows")
                await until(lambda: not lets_in(gates[1]), "the other one knows")
            two = Worker(places[1], life=1, gate=gates[2])
            async with two.running():
                await until(lambda: two.gossip.stats.received, "the new worker hears")
                with pytest.raises(ApiError, match="concurrent"):
                    gates[2].enter(gates[2].tenant_of(FIELDS))
                for entry in held:
                    entry.leave(None)
                await until(lambda: not gates[2].account("ada")._active_elsewhere, "the places are free")
                with pytest.raises(ApiError, match="requests_per_minute"):
                    gates[2].enter(gates[2].tenant_of(FIELDS))


async def test_the_places_of_a_worker_that_is_gone_are_free_without_a_successor(tmp_path: Path) -> None:
    with seats(2) as places:
        gates = [gate_of(tmp_path, "concurrent_requests = 1") for _ in "ab"]
        now_s = time.monotonic
        ahead = [0.0]
        one, two = Worker(places[0], gate=gates[0]), Worker(places[1], gate=gates[1])
        two.gossip._clock = lambda: now_s() + ahead[0]
        async with two.running():
            async with one.running():
                gates[0].enter(gates[0].tenant_of(FIELDS))
                await until(lambda: not lets_in(gates[1]), "the sibling knows")
            ahead[0] = SILENCE_S + 1
            await until(lambda: lets_in(gates[1]), "the place is free")


async def test_the_use_of_very_many_tenants_is_published_in_turns(tmp_path: Path) -> None:
    count = 1200
    keys = "".join(
        f'[tenants.t{n}]\nconcurrent_requests = 1\n[[keys]]\ntenant = "t{n}"\n'
        f'sha256 = "{hashlib.sha256(b"k%d" % n).hexdigest()}"\n'
        for n in range(count)
    )
    (tmp_path / "keys").write_text(keys)

    with seats(2) as places:
        gates = [
            KeyGate(KeyFile(tmp_path / "keys", clock=time.monotonic), clock=time.monotonic) for _ in "ab"
        ]
        for number in range(count):
            gates[0].account(f"t{number}").enter(time.monotonic())
        one, two = (Worker(place, gate=gate) for place, gate in zip(places, gates, strict=True))
        async with one.running(), two.running():
            await until(
                lambda: all(gates[1].account(f"t{n}")._active_elsewhere for n in range(count)), "all known"
            )
        assert two.gossip.stats.refused == 0
