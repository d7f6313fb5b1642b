"""A ``vllm.general_plugins`` entry point that replaces the event publisher of a stock vLLM, to add snapshots.

Install the package beside vLLM and set ``KVATLAS_PUBLISHER=1``; without the variable nothing changes.
``--kv-events-config`` keeps its meaning. Live and replayed frames stay those of vLLM, with a publisher id
appended to the payload. The replay endpoint also answers ``b"snapshot"`` (``zmq_publisher``).

The scheduler calls ``publish``, which does no more than vLLM's: it puts the batch in a bounded queue. One
thread with its own event loop encodes, sends, updates the ledger and serves all answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from typing import Any

import msgspec

from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.publisher.zmq_publisher import ZmqPublisher, rank_endpoint

ENABLE = "KVATLAS_PUBLISHER"
_STOP_S = 1.0
_log = logging.getLogger("vllm.kvatlas")


class EventPublisher:
    """Replacement for ``vllm.distributed.kv_events.ZmqEventPublisher``: same arguments, same methods."""

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        self._rank = data_parallel_rank
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max_queue_size)
        self._encoder = msgspec.msgpack.Encoder()
        self._config = {
            "endpoint": rank_endpoint(endpoint, data_parallel_rank),
            "replay_endpoint": rank_endpoint(replay_endpoint, data_parallel_rank)
            if replay_endpoint
            else None,
            "buffer_steps": buffer_steps,
            "hwm": hwm,
            "max_queue_size": max_queue_size,
            "topic": topic,
        }
        self._publisher = ZmqPublisher(
            endpoint,
            replay_endpoint=replay_endpoint or None,
            topic=topic,
            data_parallel_rank=data_parallel_rank,
            buffer_steps=buffer_steps,
            hwm=hwm,
            ledger=SnapshotLedger(),
        )
        self._loop = asyncio.new_event_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvatlas-publisher")
        self._thread.start()

    @property
    def replay_endpoint(self) -> str | None:
        """Address of the socket for replay and snapshots."""
        return self._publisher.replay_endpoint

    def publish(self, events: Any) -> None:
        """Queue one ``EventBatch``; waits while the queue is full, as vLLM's does."""
        if self._stopped.is_set():
            raise RuntimeError("Publisher is closed")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._rank
        self._queue.put(events)
        self._loop.call_soon_threadsafe(self._send_one)

    def shutdown(self) -> None:
        """Send the queued batches for at most a second, then close; a second call does nothing."""
        if not self._stopped.is_set():
            self._stopped.set()
            # The loop runs callbacks in order: it stops after every batch published before.
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)

    def get_publisher_config(self) -> Any:
        """Configuration shown by ``GET /kv_event_sources``."""
        from vllm.config.kv_events import KVEventsConfig  # noqa: PLC0415  # vLLM is not a dependency

        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **self._config)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.call_soon(self._publisher.start)
            self._loop.run_forever()
        finally:
            self._publisher.close()
            self._loop.close()

    def _send_one(self) -> None:
        batch = self._queue.get_nowait()
        try:
            wire = [batch.ts, batch.events, batch.data_parallel_rank, self._publisher.publisher_id]
            self._publisher.publish_payload(self._encoder.encode(wire))
        except Exception:  # noqa: BLE001  # one bad batch must not end the stream
            _log.exception("kvatlas could not publish a batch of KV events")


def register() -> None:
    """Entry point: vLLM calls it in every process it starts."""
    if os.environ.get(ENABLE, "") != "1":
        return
    from vllm.distributed import kv_events  # noqa: PLC0415

    stock = kv_events.ZmqEventPublisher

    def create(data_parallel_rank: int, endpoint: str = "tcp://*:5557", **options: Any) -> Any:
        # Leave to vLLM the endpoints that it would connect to, or bind to a port it looks up itself.
        bindable = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        if not bindable or endpoint.endswith(":0") or (options.get("replay_endpoint") or "").endswith(":0"):
            _log.warning("kvatlas leaves the event endpoint %s to vLLM's publisher: no snapshots", endpoint)
            return stock(data_parallel_rank=data_parallel_rank, endpoint=endpoint, **options)
        _log.info("kvatlas publishes the KV events of rank %d, with snapshots", data_parallel_rank)
        return EventPublisher(data_parallel_rank, endpoint, **options)

    # vLLM's configuration accepts no publisher name except "zmq", so replace that entry.
    kv_events.EventPublisherFactory._registry["zmq"] = create  # noqa: SLF001
