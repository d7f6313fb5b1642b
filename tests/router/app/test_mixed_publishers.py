"""A fleet of engines of several makers behind a whole router: each prediction is exact, or says why not."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockRemoved, BlockStored, WireHash, to_block_hash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.schema import Config
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.placement.candidate import PolicySettings
from tests.router.app.test_engines import own_ports
from tests.support.foreign_publishers import MAKERS, Maker
from tests.support.store_publishers import MooncakeStore, MooncakeTier
from tests.support.waiting import until
from tests.support.whole_router import MODEL, QUICK, Rig, configure, routing, running

TENSORRT, ATOM = MAKERS[:2]
MLA = (GroupSpec(0, "mla_attention", 16),)
_MULTIPLIER = 0x9E3779B97F4A7C15


def other(value: WireHash, *, signed: bool) -> int:
    """A hash of the same prefix by another maker."""
    mixed = (to_block_hash(value) * _MULTIPLIER) % (1 << 64)
    return mixed - (1 << 64) if signed and mixed >> 63 else mixed


class Unnumbered:
    """A socket that sends batches without their number, some without their topic."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_multipart(self, frames: tuple[bytes, bytes, bytes], flags: int) -> None:
        topic, seq, payload = frames
        self._socket.send_multipart((topic, payload) if seq[-1] % 2 else (payload,), flags)


def speak(engine: SimulatedEngine, maker: Maker) -> None:
    """Let an engine publish as this maker's do, with events of types and fields of its own."""
    publisher = cast("ZmqPublisher", engine.publisher)
    send, signed = publisher.publish_payload, maker is TENSORRT

    def publish(payload: bytes) -> int:
        batch, events = decode_batch(payload), [maker.noise]
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                events.append(maker.removed([other(block, signed=signed) for block in event.block_hashes]))
            elif isinstance(event, BlockStored):
                hashes = [other(block, signed=signed) for block in event.block_hashes]
                before = event.parent_block_hash
                parent = None if before is None else other(before, signed=signed)
                events.append(
                    maker.stored(cast("list[WireHash]", hashes), parent, event.tokens(), event.block_size)
                )
        return send(msgspec.msgpack.encode([batch.ts, [*events, maker.noise], 0]))

    publisher.publish_payload = publish  # type: ignore[method-assign]
    if not maker.numbered:
        publisher._pub = Unnumbered(publisher._pub)  # type: ignore[assignment]


async def test_a_router_that_comes_late_knows_a_prompt_after_its_first_turn() -> None:
    """No replay: the events of the beginning, which all prompts share, are lost."""
    async with running({"groups": "full"}) as (engine,):
        speak(engine, ATOM)
        publisher = cast("ZmqPublisher", engine.publisher)
        common = "The rules of the house. " * 40
        async with aiohttp.ClientSession() as session:
            body = {"model": MODEL, "max_tokens": 1, "prompt": common}
            async with session.post(f"{engine.base_url}{COMPLETION}", json=body) as answer:
                assert answer.status == 200
        address, before = EngineAddress(engine.base_url, events=engine.events_endpoint), publisher.next_seq
        async with routing(configure(address), wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "ready")
            stats = rig.router.lifecycle.feeds.stats

            def applied() -> bool:
                return stats[engine.base_url].batches == publisher.next_seq - before

            for number in (1, 2, 3, 1):
                prompt = f"{common} Question {number}. " + "Why? " * 20
                await rig.ok("POST", COMPLETION, {**body, "prompt": prompt})
                await until(lambda: rig.idle, "answered")
                await until(applied, "applied")
            told = [one.outcome for one in rig.router.accounts.receipts.latest]
            assert told == ["unpredicted", "under", "exact", "exact"]
            hits = [one.predicted_tokens or 0 for one in rig.router.accounts.receipts.latest]
            assert hits[3] > hits[2] > 300, "the second one's report placed what the first one left"


class Mixed:
    """Engines of several makers before one router: two of vLLM, with these groups, SGLang, TensorRT-LLM,
    ATOM, and one without events. With one group those of vLLM load from a store."""

    def __init__(self, groups: str | tuple[GroupSpec, ...]) -> None:
        full: dict[str, Any] = {"groups": "full", "num_blocks": 400}
        self.shares = groups in {"full", MLA}
        vllm = full | {"groups": groups, "num_blocks": 100 if self.shares else 300}
        kinds = [vllm, vllm, full | {"kind": "sglang"}, full, full, full | {"publish_events": False}]
        self._settings = [EngineSettings(**{**QUICK, **kind, **own_ports()}) for kind in kinds]
        self.store = MooncakeStore("tcp://127.0.0.1:19997")
        self.engines: list[SimulatedEngine] = []
        # Batches of ATOM that it published before it was followed, less those of its last process.
        self._unheard = 0

    async def start(self, number: int) -> SimulatedEngine:
        engine = SimulatedEngine(self._settings[number])
        await engine.start()
        if number < 2 and self.shares:
            engine.scheduler._tier = MooncakeTier(self.store)  # type: ignore[assignment]
        if number in {3, 4}:
            speak(engine, TENSORRT if number == 3 else ATOM)
        return engine

    def configured(self) -> Config:
        *others, atom, silent = self.engines
        listed = [
            EngineAddress(one.base_url, events=one.events_endpoint, replay=one.replay_endpoint)
            for one in others
        ]
        listed += [EngineAddress(atom.base_url, events=atom.events_endpoint), EngineAddress(silent.base_url)]
        pool = StoreSettings(
            name="pool",
            kind="mooncake",
            events=(self.store.endpoint,),
            model=MODEL,
            engines=tuple(one.base_url for one in self.engines[:2]),
        )
        # These engines compute in next to no time: so must a load.
        policy = PolicySettings(storage_load_s_per_token=1e-9, load_s_per_token=1e-9)
        return configure(*listed, stores=(pool,) if self.shares else (), policy=policy)

    async def caught_up(self, rig: Rig) -> None:
        """The router knows all that happened."""
        await until(lambda: rig.idle, "answered")
        await rig.caught_up(*self.engines[:4])
        await until(lambda: self._waiting_of_atom(rig) == self._unheard, "every batch of ATOM applied")
        if self.shares:
            (feed,) = rig.router.lifecycle.stores
            await until(lambda: feed.stats.batches == self.store.sent, "what the store holds is known")

    def _waiting_of_atom(self, rig: Rig) -> int:
        feed = rig.router.lifecycle.feeds.stats[self.engines[4].base_url]
        return cast("ZmqPublisher", self.engines[4].publisher).next_seq - feed.batches

    async def restart(self, rig: Rig, number: int) -> None:
        known = rig.router.fleet.get(self.engines[number].base_url)
        assert known is not None
        await self.engines[number].stop()
        await until(lambda: not known.up, "seen to be down")
        self.engines[number] = await self.start(number)
        await until(lambda: known.up and rig.router.readiness().ready, "seen to be up")
        if number == 5:
            return
        feeds, wanted = rig.router.lifecycle.feeds.stats, "unnumbered" if number == 4 else ""

        def followed() -> bool:
            feed = feeds[known.engine_id]
            return feed.restarts > 0 and not feed.unconfirmed and feed.reason == wanted

        await until(followed, "its present process is followed")
        if number == 4:
            self._unheard = self._waiting_of_atom(rig)


@pytest.mark.long
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("groups", ["full", pytest.param(MLA, id="mla"), "gptoss-like", "mamba-hybrid"])
async def test_a_fleet_of_several_makers(groups: str | tuple[GroupSpec, ...], restarts: bool) -> None:
    mixed = Mixed(groups)
    async with AsyncExitStack() as stack:
        stack.callback(mixed.store.close)
        for number in range(6):
            mixed.engines.append(await mixed.start(number))
            stack.push_async_callback(lambda number=number: mixed.engines[number].stop())  # type: ignore[misc]
        rig = await stack.enter_async_context(routing(mixed.configured(), wait=False))
        await until(lambda: all(one.up for one in rig.router.fleet), "up")
        await until(lambda: rig.router.readiness().ready, "ready")
        for feed in rig.router.lifecycle.stores:
            await until(lambda feed=feed: feed.stats.connected, "the store")  # type: ignore[misc]
        rng = random.Random(1)
        stories = [f"Story {number}. " + "It goes on and on. " * 30 for number in range(12)]
        for turn in range(90):
            number = rng.randrange(len(stories))
            stories[number] += rng.choice(("", f"Turn {rng.random()}. " * 4))
            await rig.ok("POST", COMPLETION, {"model": MODEL, "max_tokens": 2, "prompt": stories[number]})
            await mixed.caught_up(rig)
            if restarts and turn % 15 == 14:
                await mixed.restart(rig, turn // 15)
            if rng.random() < 0.2:
                mixed.store.evict(10 if not restarts else len(mixed.store.held))
                await mixed.caught_up(rig)
        names = {one.base_url: maker for one, maker in zip(mixed.engines, "vvstan", strict=True)}
        receipts = list(rig.router.accounts.receipts.latest)
        told = Counter((names[one.engine_id], one.mode, one.outcome) for one in receipts)
        # Of ATOM nothing is known before its first event: no replay tells whether it holds anything.
        assert told.pop(("a", "none", "unpredicted")) == 1 + restarts
        modes = {(maker, mode) for maker, mode, _ in told}
        learned = {("t", "learned"), ("a", "learned")}
        assert modes - {("t", "native")} == {("v", "native"), ("s", "native"), ("n", "shadow")} | learned
        assert {outcome for _, _, outcome in told} == {"exact"}
        assert sum(one.actual_tokens or 0 for one in receipts) > 10_000
        assert (sum(one.storage_tokens for one in receipts) > 200) is mixed.shares
