"""Load told between replicas: counted while its teller lives, never twice, never one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Rows
from kvatlas.router.placement.load import LoadAccount
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.rates import FleetRates
from kvatlas.router.replication.gossip import GossipStats, HeartbeatMonitor
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.messages import VERSION
from kvatlas.router.replication.reader import SharedRows
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import IndexRefused

E = "http://e"


def gossip(me: str, load: dict[str, OthersLoad]) -> LoadGossip:
    return LoadGossip(me, lambda _: dict(load), started=1, silence_s=2.0)


def test_others_are_added_up_and_one_is_not_counted_oneself() -> None:
    fields = {}
    for name, tokens in (("a", 10), ("b", 20), ("me", 40)):
        field = gossip(name, {E: OthersLoad(1, 2, tokens)}).field(0.0)
        assert field is not None
        fields[name] = field
    assert gossip("me", {}).others(fields, 0.0) == {E: OthersLoad(2, 4, 30)}


def test_a_silent_replica_counts_no_longer_and_counts_again_when_it_speaks() -> None:
    writer, reader = gossip("a", {E: OthersLoad(1, 0, 5)}), gossip("me", {})
    field = writer.field(0.0)
    assert field is not None
    writer.sent(field, 0.0)
    assert reader.others({"a": field}, 0.0)
    assert reader.others({"a": field}, 2.0)
    assert reader.others({"a": field}, 2.1) == {}
    again = writer.field(2.5)
    assert again is not None
    assert reader.others({"a": again}, 2.6) == {E: OthersLoad(1, 0, 5)}


def test_unchanged_loads_are_repeated_only_while_not_empty() -> None:
    load = {E: OthersLoad(1, 0, 5)}
    writer = gossip("a", load)
    field = writer.field(0.0)
    assert field is not None
    writer.sent(field, 0.0)
    assert writer.field(0.1) is None
    assert writer.field(0.5) is not None
    load.clear()
    last = writer.field(0.6)
    assert last is not None
    writer.sent(last, 0.6)
    assert writer.field(100.0) is None


def test_a_field_that_cannot_be_read_counts_as_nothing() -> None:
    assert gossip("me", {}).others({"a": b"\xc1", "b": b"x"}, 0.0) == {}


def test_two_lives_of_a_replica_differ_in_their_beat() -> None:
    first = LoadGossip("a", lambda _: {E: OthersLoad(1)}, started=1000).field(0.0)
    second = LoadGossip("a", lambda _: {E: OthersLoad(1)}, started=2000).field(0.0)
    assert first != second


def test_a_pulse_is_dead_after_the_limit_and_forgotten_on_demand() -> None:
    monitor = HeartbeatMonitor(3.0)
    assert monitor.beat("a", 1, 0.0)
    assert monitor.beat("a", 1, 3.0)
    assert not monitor.beat("a", 1, 3.1)
    assert monitor.silent_s("a", 5.0) == 5.0
    assert monitor.beat("a", 2, 5.0)
    monitor.keep_only([])
    assert monitor.silent_s("a", 50.0) == 0.0


def test_the_load_of_others_is_waited_for_and_the_gauges_do_not_count_it_twice() -> None:
    account = LoadAccount(FleetRates().engine())
    others = OthersLoad(running=3, waiting=2, tokens=4000)
    rate = account.rates.prefill_s_per_token(0.0)
    empty = account.current(0.0, others)
    assert (empty.running, empty.waiting, empty.foreign) == (3, 2, 5)
    assert empty.queue_s == 4000 * rate
    account.report(running=3, waiting=2, now=0.0)
    shown = account.current(0.0, others)
    assert (shown.running, shown.waiting, shown.foreign) == (3, 2, 5)
    assert shown.queue_s == 4000 * rate
    alone = account.current(0.0)
    assert (alone.running, alone.waiting) == (3, 2)


def test_own_load_is_published_without_that_of_others() -> None:
    account = LoadAccount(FleetRates().engine())
    account.report(running=5, waiting=5, now=0.0)
    assert account.own(0.0) is None
    ticket = account.admit(uncached_tokens=1000, now=0.0)
    own = account.own(0.0)
    assert own is not None
    assert own.in_flight == (0, 1, 1000)
    account.first_token(ticket, 0.1)
    assert account.own(0.1) == OthersLoad(1, 0, 0, own.recent_ms)
    account.finish(ticket, 0.2)
    assert account.own(0.2) == OthersLoad(0, 0, 0, own.recent_ms)
    assert account.own(300.0) is None, "it has faded"


def test_recent_work_of_others_is_added_and_never_reported_as_ones_own() -> None:
    account = LoadAccount(FleetRates().engine())
    rate = account.rates.prefill_s_per_token(0.0)
    account.finish(account.admit(uncached_tokens=round(3.0 / rate), now=0.0), 0.0)
    assert account.ahead(0.0, OthersLoad(recent_ms=4500), rate)[5] == pytest.approx(7.5, abs=0.01)
    assert account.current(0.0, OthersLoad(recent_ms=4500)).recent_s == pytest.approx(7.5, abs=0.01)
    assert account.own(0.0) == OthersLoad(recent_ms=3000)
    assert account.current(0.0).recent_s == pytest.approx(3.0, abs=0.01)


def test_recent_work_that_fades_is_written_with_the_heartbeat_only() -> None:
    load = {E: OthersLoad(1, 0, 5, 4000)}
    writer = gossip("a", load)
    writer.sent(writer.field(0.0) or b"", 0.0)
    load[E] = OthersLoad(1, 0, 5, 3900)
    assert writer.field(0.4) is None
    field = writer.field(0.5)
    assert field is not None
    assert gossip("me", {}).others({"a": field}, 0.5) == load


@pytest.mark.parametrize("value", [-1, 1 << 40, 1.5, "1", None])
@pytest.mark.parametrize("place", range(5))
def test_a_field_with_values_out_of_bounds_counts_as_nothing(place: int, value: object) -> None:
    stats = GossipStats()
    reader = LoadGossip("me", lambda _: {}, started=1, stats=stats)
    numbers: list[object] = [1, 1, 1, 1, 1]
    numbers[place] = value
    field = msgspec.msgpack.encode([VERSION, 7, {E: numbers}])
    assert reader.others({"a": field}, 0.0) == {}
    assert reader.others({"a": field}, 0.1) == {}
    assert stats.malformed == 1, "the same bytes count once"


def test_a_router_that_lacks_later_fields_or_has_more_is_understood() -> None:
    for numbers in ([1, 2, 3], [1, 2, 3, 0, 0, 0, "of a later router"]):
        field = msgspec.msgpack.encode([VERSION, 7, {E: numbers}, "more"])
        assert gossip("me", {}).others({"a": field}, 0.0) == {E: OthersLoad(1, 2, 3)}


def test_a_link_is_busy_until_the_latest_end_and_time_passes_between_messages() -> None:
    said = {"a": OthersLoad(1, 0, 5, 0, 900), "b": OthersLoad(1, 0, 5, 0, 400)}
    fields = {name: gossip(name, {E: load}).field(0.0) or b"" for name, load in said.items()}
    reader = gossip("me", {})
    assert reader.others(fields, 0.0)[E].link_ms == 900, "not the sum: each has the other's"
    assert reader.others(fields, 0.3)[E].link_ms == 600
    assert reader.others(fields, 1.0)[E].link_ms == 0
    again = gossip("a", {E: OthersLoad(1, 0, 5, 0, 300)})
    again.sent(fields["a"], 0.0)
    assert reader.others({"a": again.field(1.1) or b""}, 1.2)[E].link_ms == 300, "from the newest message on"


def test_own_use_of_a_link_is_published_while_it_lasts() -> None:
    account = LoadAccount(FleetRates().engine())
    account.link_free_s = 10.75
    assert account.own(10.0) == OthersLoad(link_ms=750)
    assert account.own(10.75) is None
    account.link_free_s = 1e9
    assert msgspec.msgpack.decode(gossip("a", {E: account.own(0.0) or OthersLoad()}).field(0.0) or b"")
    assert gossip("me", {}).others(
        {"a": gossip("a", {E: account.own(0.0) or OthersLoad()}).field(0.0) or b""}, 0.0
    )


class Reader:
    """A shared index in which one replica has written what it has in flight."""

    def __init__(self, field: bytes) -> None:
        self._rows = SharedRows(Rows(0, {}), {}, {"a": field})
        self.error: Exception | None = None

    def engines(self, model: str) -> dict[str, Any]:
        return {}

    async def lookup(self, hashes: Sequence[BlockHash], model: str) -> SharedRows:
        if self.error is not None:
            raise self.error
        return self._rows


class Own:
    """Follows nothing."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    holds_exclusively = follows


async def test_the_load_of_others_is_known_while_look_ups_tell_it() -> None:
    reader, own, now = Reader(gossip("a", {E: OthersLoad(1, 2, 300)}).field(0.0) or b""), Own(), [0.0]
    index: Any = reader
    lookup = IndexLookup(lambda: index, own, gossip("me", {}), clock=lambda: now[0])
    assert lookup.last_load() is None, "nothing has been asked yet"
    told = (await lookup.look(None, {E: "m"})).load
    assert told == lookup.last_load() == {E: OthersLoad(1, 2, 300)}
    reader.error = IndexUnavailable("timeout")
    failed = await lookup.look(None, {E: "m"})
    assert (failed.problem, failed.load) == ("timeout", None)
    now[0] = 2.1
    assert lookup.last_load() is None
    own.others_alive = False
    assert lookup.last_load() == {}, "there are no others"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (IndexUnavailable("timeout"), "timeout"),
        (IndexRefused("schema 2"), "refused"),
        (ZeroDivisionError(), "fault"),
    ],
)
async def test_after_three_failures_of_any_kind_the_index_is_asked_again_later(
    error: Exception, problem: str
) -> None:
    reader, now = Reader(b""), [0.0]
    reader.error = error
    index: Any = reader
    lookup = IndexLookup(lambda: index, Own(), gossip("me", {}), clock=lambda: now[0])

    async def look() -> str:
        return (await lookup.look(None, {E: "m"})).problem

    with capture_logs():
        assert [await look() for _ in range(5)] == [problem] * 3 + ["circuit"] * 2
    reader.error, now[0] = None, 0.5
    assert [await look(), await look()] == ["", ""]
