from __future__ import annotations

from typing import Any

import pytest

from kvatlas.connectors.store.base import StoreUnavailable
from kvatlas.connectors.store.mooncake import MooncakeSettings, MooncakeStore
from tests.connectors.store.mooncake_double import Cluster, DoubleClient
from tests.support.waiting import HANG_S

SETTINGS = MooncakeSettings(
    master="host:50051",
    metadata="http://host:8080/metadata",
    hostname="me",
    protocol="rdma",
    devices="mlx5_0",
)  # fmt: skip


def opened(cluster: Cluster, **others: Any) -> tuple[MooncakeStore, DoubleClient]:
    client = DoubleClient(cluster)
    return MooncakeStore(SETTINGS, client=client, **others), client


def test_it_is_set_up_as_told_and_lends_memory_only_where_it_moves_any() -> None:
    rest = (64 << 20, "rdma", "mlx5_0", "host:50051")
    assert opened(Cluster())[1].set_up_with == ("me", SETTINGS.metadata, 1 << 30, *rest)
    assert opened(Cluster(), lends=False)[1].set_up_with == ("me", SETTINGS.metadata, 0, *rest)


def test_a_master_that_does_not_answer_is_an_error_at_start() -> None:
    cluster = Cluster()
    cluster.silent = True
    with pytest.raises(StoreUnavailable, match="host:50051"):
        opened(cluster)


def test_a_master_that_went_silent_cannot_be_asked() -> None:
    cluster = Cluster()
    store, _ = opened(cluster)
    cluster.silent = True
    with pytest.raises(StoreUnavailable, match="-1"):
        store.exists([b"key"], HANG_S)


def test_memory_that_was_not_registered_is_refused() -> None:
    store, _ = opened(Cluster())
    buffer = memoryview(bytearray(100))
    store.register_buffer(buffer[:50])
    assert store.put([(b"key", buffer[10:50])], HANG_S) == [True]
    for wrong in (buffer[40:60], buffer[60:]):
        with pytest.raises(ValueError, match="register_buffer"):
            store.put([(b"key", wrong)], HANG_S)


def test_closing_gives_memory_back_once_and_ends_all_calls() -> None:
    store, client = opened(Cluster())
    store.register_buffer(memoryview(bytearray(100)))
    store.close()
    store.close()
    assert client.regions == {}
    with pytest.raises(StoreUnavailable, match="closed"):
        store.exists([b"key"], HANG_S)


def test_a_deadline_that_passed_ends_a_call() -> None:
    store, _ = opened(Cluster())
    with pytest.raises(StoreUnavailable, match="deadline"):
        store.exists([b"key"], 0.0)
