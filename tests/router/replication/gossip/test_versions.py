"""Messages between routers of two versions: ignored, and counted apart from malformed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvatlas.router.admission.others_use import Uses
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.gossip import GossipEntry, GossipStats, InflightEvent
from kvatlas.router.replication.limits import LimitStats, UseMessage
from kvatlas.router.replication.load_gossip import ReplicaLoad
from kvatlas.router.replication.messages import VERSION, PeerMessages
from kvatlas.router.workers.gossip import WorkerGossipStats, WorkerMessage

E = "http://e"
KINDS: list[tuple[Any, Callable[[], Any]]] = [
    (GossipEntry("one", 1, 1, InflightEvent.SENT, E, (3, (4, 9, 2)), bytes(16)), GossipStats),
    (ReplicaLoad(3, {E: OthersLoad(1, 2, 30)}), GossipStats),
    (UseMessage("group", Uses(1, 2, True, {})), LimitStats),
    (WorkerMessage(0, 1.5, [b"x"], b"y", [(bytes(8), E)], None), WorkerGossipStats),
]


@pytest.mark.parametrize(("message", "stats_of"), KINDS, ids=lambda one: type(one).__name__)
def test_a_written_value_is_read_and_begins_with_the_version(
    message: Any, stats_of: Callable[[], Any]
) -> None:
    stats = stats_of()
    encoded = msgspec.msgpack.encode(message)
    assert PeerMessages(type(message), stats).read(encoded) == message
    assert msgspec.msgpack.decode(encoded)[0] == VERSION
    assert (stats.malformed, stats.other_version) == (0, 0)


@pytest.mark.parametrize("version", [0, VERSION + 1, 1 << 40, -1])
@pytest.mark.parametrize("more", [[], ["of another", {"form": [1, 2]}]], ids=["short", "longer"])
@pytest.mark.parametrize(("message", "stats_of"), KINDS, ids=lambda one: type(one).__name__)
def test_another_version_is_ignored_and_no_fault(
    message: Any, stats_of: Callable[[], Any], version: int, more: list[Any]
) -> None:
    """Also where the rest has the form of this version: it may mean something else."""
    stats = stats_of()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))[1:]
    reader = PeerMessages(type(message), stats)
    for rest in (fields, more):
        assert reader.read(msgspec.msgpack.encode([version, *rest])) is None
    assert (stats.malformed, stats.other_version) == (0, 2)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([VERSION]),
        msgspec.msgpack.encode({"version": 2}),
        msgspec.msgpack.encode(["1", 2, 3]),
        msgspec.msgpack.encode([True, 2, 3]),
        b"\x91" * 5000,
    ],
    ids=range(8),
)
@pytest.mark.parametrize(("kind", "stats_of"), KINDS, ids=lambda one: type(one).__name__)
def test_a_value_without_version_or_of_another_form_is_malformed(
    kind: Any, stats_of: Callable[[], Any], message: bytes
) -> None:
    stats = stats_of()
    assert PeerMessages(type(kind), stats).read(message) is None
    assert (stats.malformed, stats.other_version) == (1, 0)
