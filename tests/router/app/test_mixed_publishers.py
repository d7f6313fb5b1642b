"""A fleet of engines of several makers behind a whole router: each prediction is exact, or says why not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockRemoved, BlockStored, WireHash, to_block_hash
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.placement.candidate import PolicySettings
from tests.support.foreign_publishers import MAKERS, Maker
from tests.support.store_publishers import MooncakeStore, MooncakeTier
from tests.support.waiting import until
from tests.support.whole_router import MODEL, configure, routing, running

TENSORRT, ATOM = MAKERS[:2]
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


@pytest.mark.long
async def test_a_fleet_of_several_makers() -> None:
    full = {"groups": "full", "num_blocks": 400}
    small = {"num_blocks": 100}
    kinds: list[dict[str, Any]] = [small, small, {"kind": "sglang"}, {}, {}, {"publish_events": False}]
    async with running(*[{**full, **kind} for kind in kinds]) as engines:
        vllm, other_vllm, sglang, tensorrt, atom, silent = engines
        store = MooncakeStore("tcp://127.0.0.1:19997")
        for one in (vllm, other_vllm):
            one.scheduler._tier = MooncakeTier(store)  # type: ignore[assignment]
        speak(tensorrt, TENSORRT)
        speak(atom, ATOM)
        addresses = [
            EngineAddress(one.base_url, events=one.events_endpoint, replay=one.replay_endpoint)
            for one in (vllm, other_vllm, sglang, tensorrt)
        ]
        addresses.append(EngineAddress(atom.base_url, events=atom.events_endpoint))
        addresses.append(EngineAddress(silent.base_url))
        pool = StoreSettings(
            name="pool",
            kind="mooncake",
            events=(store.endpoint,),
            model=MODEL,
            engines=(vllm.base_url, other_vllm.base_url),
        )
        # These engines compute in next to no time: so must a load.
        policy = PolicySettings(storage_load_s_per_token=1e-9, load_s_per_token=1e-9)
        async with routing(configure(*addresses, stores=(pool,), policy=policy), wait=False) as rig:
            fleet, (followed,) = rig.router.fleet, rig.router.lifecycle.stores
            await until(lambda: all(one.up for one in fleet) and rig.router.readiness().ready, "ready")
            await until(lambda: followed.stats.connected, "the store")
            rng = random.Random(1)
            stories = [f"Story {number}. " + "It goes on and on. " * 30 for number in range(12)]
            for _ in range(90):
                number = rng.randrange(len(stories))
                stories[number] += rng.choice(("", f"Turn {rng.random()}. " * 4))
                body = {"model": MODEL, "max_tokens": 2, "prompt": stories[number]}
                await rig.ok("POST", COMPLETION, body)
                await until(lambda: rig.idle, "answered")
                await rig.caught_up(vllm, other_vllm, sglang, tensorrt, atom)
                await until(lambda: followed.stats.batches == store.sent, "what the store holds is known")
                if rng.random() < 0.2:
                    store.evict(10)
                    await until(lambda: followed.stats.batches == store.sent, "so are its evictions")
            names = {one.base_url: maker for one, maker in zip(engines, "vvstan", strict=True)}
            told = Counter(
                (names[receipt.engine_id], receipt.mode, receipt.outcome)
                for receipt in rig.router.accounts.receipts.latest
            )
            # Of ATOM nothing is known before its first event: no replay tells whether it holds anything.
            assert told.pop(("a", "none", "unpredicted")) == 1
            modes = {(maker, mode) for maker, mode, _ in told}
            learned = {("t", "learned"), ("a", "learned")}
            assert modes - {("t", "native")} == {("v", "native"), ("s", "native"), ("n", "shadow")} | learned
            assert {outcome for _, _, outcome in told} == {"exact"}
            hits = sum(receipt.actual_tokens or 0 for receipt in rig.router.accounts.receipts.latest)
            assert hits > 10_000
            loaded = sum(receipt.storage_tokens for receipt in rig.router.accounts.receipts.latest)
            assert loaded > 500, "by the two engines from their store"
        store.close()
