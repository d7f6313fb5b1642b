"""Prompts in flight told between replicas: the same herd is seen everywhere, as long as it flies."""

from __future__ import annotations

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.replication.gossip import GossipedInflight, GossipEntry, InflightEvent

E = "http://e"
HASHES = [BlockHash(value) for value in (11, 12, 1 << 63, 14)]


class Stream:
    """Messages of all replicas, and how far each has read."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.open = True

    def join(self, name: str, started: int = 1) -> GossipedInflight:
        return GossipedInflight(name, started, self._publish)

    def _publish(self, engine_id: str, entry: bytes) -> bool:
        if self.open:
            self.entries.append(entry)
        return self.open


def test_prompts_of_one_replica_are_seen_by_the_other_until_they_end() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    prompt = one.add(E, HASHES, 0.0, keeps=(range(2, 5, 2),))
    two.receive(stream.entries, 0.0)
    common = two.common([*HASHES[:3], BlockHash(99)], 0.0)
    assert (common.blocks, common.coming) == ({E: 3}, {E: 2})
    one.end(prompt, 1.0)
    two.receive(stream.entries[1:], 1.0)
    grace = two.settings.grace_s
    assert two.common(HASHES, 1.0 + grace / 2).blocks == {E: 4}
    assert two.common(HASHES, 1.0 + grace).blocks == {}
    assert one.check_integrity() == two.check_integrity() == []


def test_ends_in_no_order_or_out_of_bounds_leave_the_books_right() -> None:
    stream = Stream()
    two = stream.join("two")
    packed = b"".join(block.to_bytes(8, "little") for block in HASHES)
    entry = GossipEntry("one", 1, 1, InflightEvent.SENT, E, (3, 0, 2, 3, -1, 9), packed)
    two.receive([msgspec.msgpack.encode(entry)], 0.0)
    assert two.common(HASHES, 0.0).coming == {E: 3}
    assert two.check_integrity() == []
    two.lost("one")
    assert two.common(HASHES, 0.0).blocks == {}
    assert two.check_integrity() == []


def test_a_failed_prompt_leaves_immediately() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    one.drop(one.add(E, HASHES, 0.0))
    two.receive(stream.entries, 0.0)
    assert two.common(HASHES, 0.0).blocks == {}


def test_kept_blocks_count_until_the_batch_can_have_been_applied() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    stored: set[BlockHash] = set()
    one.is_stored = lambda engine_id, block: False  # another replica follows the engine
    two.is_stored = lambda engine_id, block: block in stored
    prompt = one.add(E, HASHES, 0.0, keeps=(range(4, 5),))
    one.prefilled(prompt, 0.0)
    two.receive(stream.entries, 0.0)
    assert one.common(HASHES, 0.0).coming == two.common(HASHES, 0.0).coming == {E: 4}
    stored.add(HASHES[3])
    two.applied(E)
    assert two.common(HASHES, 0.0).coming == {}
    grace = one.settings.grace_s
    assert one.common(HASHES, grace / 2).coming == {E: 4}
    assert one.common(HASHES, grace).coming == {}
    assert one.common(HASHES, grace).blocks == {E: 4}


def test_own_prompts_count_once_and_others_are_not_repeated() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    prompt = one.add(E, HASHES, 0.0)
    one.receive(stream.entries, 0.0)
    assert one.stats.prompts == 1
    two.receive(stream.entries, 0.0)
    two.receive([msgspec.msgpack.encode(GossipEntry("one", 1, 1, InflightEvent.ENDED))], 0.0)
    assert len(stream.entries) == 1
    one.end(prompt, 0.0)
    one.end(prompt, 0.0)
    assert len(stream.entries) == 2


def test_an_earlier_life_of_a_replica_is_another() -> None:
    stream = Stream()
    before, after = stream.join("one", 1), stream.join("one", 2)
    before.add(E, HASHES, 0.0)
    after.receive(stream.entries, 0.0)
    assert after.common(HASHES, 0.0).blocks == {E: 4}


def test_prompts_without_an_end_expire() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    one.add(E, HASHES, 0.0)
    two.receive(stream.entries, 0.0)
    two.receive([], 59.0)
    assert two.common(HASHES, 59.0).blocks == {E: 4}
    two.expire(60.0)  # also while nothing is heard
    assert two.common(HASHES, 60.0).blocks == {}
    assert two.gossip_stats.expired == 1
    two.receive([msgspec.msgpack.encode(GossipEntry("one", 1, 1, InflightEvent.ENDED))], 61.0)
    assert two.check_integrity() == []


def test_an_unsent_prompt_has_no_end_message() -> None:
    stream = Stream()
    stream.open = False
    one = stream.join("one")
    prompt = one.add(E, HASHES, 0.0)
    stream.open = True
    one.end(prompt, 0.0)
    assert stream.entries == []
    assert (one.gossip_stats.sent, one.gossip_stats.dropped) == (0, 1)


def test_entries_that_make_no_sense_cost_themselves_only() -> None:
    stream = Stream()
    one, two = stream.join("one"), stream.join("two")
    one.add(E, HASHES, 0.0)
    odd = msgspec.msgpack.encode(GossipEntry("x", 1, 1, InflightEvent.SENT, E, (), b"odd"))
    two.receive([b"\xc1", odd, *stream.entries, msgspec.msgpack.encode(["x", 1, 1, 77])], 0.0)
    assert two.gossip_stats.malformed == 3
    assert two.common(HASHES, 0.0).blocks == {E: 4}
