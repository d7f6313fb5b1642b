"""Blocks in a Mooncake store: zero copy between registered memory and the memory of other hosts, RDMA or TCP.

Needs the package ``mooncake-transfer-engine`` (or ``mooncake-transfer-engine-non-cuda`` on a host without
CUDA), and its master running. The client has time limits of its own and cannot be interrupted: a call may end
after its deadline. Values are put from, and got into, registered memory only.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.connectors.settings import ConfigError, Options
from kvatlas.connectors.store.base import Counters, Deadline, StoreUnavailable

log = logging.getLogger(__name__)

PACKAGE = "mooncake-transfer-engine"
_BATCH_ITEMS_MAX = 512
# The client's words for an object that is not there, and for one that does not fit the buffer.
_MISSES = {-704: "absent", -600: "length"}


@dataclass(frozen=True)
class MooncakeSettings:
    """``segment_bytes``: memory that this engine contributes to the store; ``buffer_bytes``: client
    buffer."""

    master: str
    metadata: str
    hostname: str
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 1 << 30
    buffer_bytes: int = 64 << 20

    @classmethod
    def parse(cls, options: Options) -> MooncakeSettings:
        return cls(
            master=options.text("master"),
            metadata=options.text("metadata", "P2PHANDSHAKE"),
            hostname=options.text("hostname", "127.0.0.1"),
            protocol=options.text("protocol", cls.protocol, choices=("tcp", "rdma")),
            devices=options.text("devices", ""),
            segment_bytes=options.size("segment_bytes", "1GiB"),
            buffer_bytes=options.size("buffer_bytes", "64MiB"),
        )


def new_client() -> Any:
    """Make a client before its setup. ConfigError naming the package if it is missing or does not load."""
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
    except ImportError as error:
        remedy = f"pip install {PACKAGE} (without CUDA: {PACKAGE}-non-cuda); it did not load: {error}"
        raise ConfigError("kind", "mooncake", remedy) from error
    return MooncakeDistributedStore()


class MooncakeStore:
    """A ``BlockStore`` on Mooncake. ``lends``: whether this process contributes memory to the store."""

    def __init__(
        self, settings: MooncakeSettings, *, lends: bool = True, name: str = "mooncake", client: Any = None
    ) -> None:
        """StoreUnavailable if the master or the metadata service does not answer."""
        self.name = name
        self._counters = Counters()
        self._regions: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._client = new_client() if client is None else client
        status = self._client.setup(
            settings.hostname,
            settings.metadata,
            settings.segment_bytes if lends else 0,
            settings.buffer_bytes,
            settings.protocol,
            settings.devices,
            settings.master,
        )
        if status != 0:
            raise StoreUnavailable(f"mooncake at {settings.master}: setting up failed with {status}")

    def register_buffer(self, buffer: memoryview) -> None:
        """StoreUnavailable if the client cannot register this memory."""
        address = _address(buffer)
        status = self._client.register_buffer(address, buffer.nbytes)
        if status != 0:
            raise StoreUnavailable(f"mooncake cannot register {buffer.nbytes} bytes: {status}")
        self._regions.append((address, buffer.nbytes))

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        found: list[bool] = []
        deadline = Deadline(deadline_s)
        for batch in self._batches(keys, deadline):
            answers = self._client.batch_is_exist([key.hex() for key in batch])
            if any(answer < 0 for answer in answers):
                raise StoreUnavailable(f"mooncake cannot tell what exists: {min(answers)}")
            found += [answer == 1 for answer in answers]
        return found

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        done: list[bool] = []
        deadline = Deadline(deadline_s)
        for batch in self._batches(items, deadline):
            answers = self._client.batch_put_from(*self._spelled(batch))
            failed = [answer for answer in answers if answer != 0]
            if failed:
                self._counters.add("refused", len(failed))
            done += [answer == 0 for answer in answers]
        return done

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        done: list[bool] = []
        deadline = Deadline(deadline_s)
        for batch in self._batches(items, deadline):
            keys, addresses, sizes = self._spelled(batch)
            answers = self._client.batch_get_into(keys, addresses, sizes)
            for answer, size in zip(answers, sizes, strict=True):
                if answer != size:
                    self._counters.add(_MISSES.get(answer, "failed") if answer < 0 else "length")
                done.append(answer == size)
        return done

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Remove by force: a bad value is removed even while a reader has a lease on it."""
        deadline = Deadline(deadline_s)
        for batch in self._batches(keys, deadline):
            self._client.batch_remove([key.hex() for key in batch], True)

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for address, _ in self._regions:
            self._client.unregister_buffer(address)
        self._client.close()

    def _batches(self, items: Sequence[Any], deadline: Deadline) -> Any:
        for start in range(0, len(items), _BATCH_ITEMS_MAX):
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if deadline.passed():
                self._counters.add("timeout")
                raise StoreUnavailable("mooncake: the deadline passed")
            yield items[start : start + _BATCH_ITEMS_MAX]

    def _spelled(self, items: Sequence[tuple[bytes, memoryview]]) -> tuple[list[str], list[int], list[int]]:
        addresses = [_address(buffer) for _, buffer in items]
        sizes = [buffer.nbytes for _, buffer in items]
        for address, size in zip(addresses, sizes, strict=True):
            if not any(low <= address and address + size <= low + length for low, length in self._regions):
                raise ValueError("mooncake moves registered memory only: call register_buffer first")
        return [key.hex() for key, _ in items], addresses, sizes


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
