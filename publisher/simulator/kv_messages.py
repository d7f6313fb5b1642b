"""Messages between simulated engines on the side channel, ``kv_transfer_params``, and connector counters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas.publisher.groups import Family, GroupSpec


class TransferHandshake(msgspec.Struct, frozen=True, tag=True):
    """Opens a transfer: the expected engine, and the settings that both sides must share."""

    engine_id: str
    common: str


class FetchRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for the blocks of a transfer; answered when they exist or on timeout."""

    transfer_id: str
    common: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read notification: the blocks of a request were read, for a prompt of this ``digest`` up to token
    ``end``.

    ``end`` 0 releases the blocks without a read.
    """

    request_id: str
    end: int = 0
    digest: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Renews the leases of these requests."""

    request_ids: list[str]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks which of these blocks the other engine's host memory holds: by group, and hash at the end."""

    common: str
    keys: list[tuple[int, int | bytes]]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Asks for this number of the blocks that a ``Probe`` found; answered when they have been sent."""

    num_blocks: int


class Reply(msgspec.Struct, frozen=True):
    """Reply to any message: ``error`` is a refusal; ``intact``: the blocks still held the computed KV;
    ``hits``: of a ``Probe``, by key."""

    error: str = ""
    intact: bool = True
    hits: list[bool] = []


Message = TransferHandshake | FetchRequest | Read | Heartbeat | Probe | Fetch


Json = dict[str, Any]


class Fault(StrEnum):
    """Effect on a real engine of parameters that no prefill engine sends."""

    ENDS = "ends"
    """No block ids: an assertion fails in the scheduler and the server exits."""
    HANGS = "hangs"
    """No address to read from: the request waits forever, and the engine exits when its client
    disconnects."""


class TransferParams(msgspec.Struct, kw_only=True):
    """``kv_transfer_params`` of requests and of a prefill engine's answers.

    Field for field as vLLM 0.30 to 0.33 with NixlConnector in pull mode. Only types are checked, as in the
    engine; missing values have the same consequences as there (``Fault``). MooncakeConnector uses
    ``transfer_id`` and ``remote_bootstrap_addr``, OffloadingConnector ``remote_decoder``,
    ``remote_prefiller`` and ``remote_kv_source``.
    """

    do_remote_decode: bool = False
    """Compute the prompt, keep its blocks, and return their address."""
    do_remote_prefill: bool = False
    """Read the prompt's blocks from another engine."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    tp_size: int | None = None
    remote_prefill_cached_tokens: int | None = None
    transfer_id: str | None = None
    remote_bootstrap_addr: str | None = None
    remote_decoder: Json | None = None
    remote_prefiller: Json | None = None
    remote_kv_source: Json | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address of the other engine's side channel."""
        return self.remote_host or "", self.remote_port or 0

    @property
    def source(self) -> str:
        """Source of the blocks, for the log."""
        return self.remote_bootstrap_addr or f"{self.remote_host}:{self.remote_port}"


def prefill_params(
    *,
    request_id: str,
    engine_id: str,
    address: tuple[str, int],
    block_ids: list[list[int]],
    num_tokens: int,
    cached_tokens: int,
    release: tuple[int, int],
) -> Json:
    """``kv_transfer_params`` of a prefill engine's answer; ``release`` is its vLLM release."""
    params: Json = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": block_ids,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    if release >= (0, 31):
        params["remote_prefill_cached_tokens"] = cached_tokens
    if release >= (0, 33):
        params["remote_registration_generation"] = 0
    return params


def transferred_blocks(group: GroupSpec, table: list[int]) -> list[int]:
    """Blocks of a request's table to transfer: a window's last ones, a Mamba group's state, else all."""
    held = [block for block in table if block]
    if group.family is Family.WINDOW:
        num_blocks = math.ceil((group.sliding_window or 1) / group.block_size) + 1
        return held[-num_blocks:]
    return held[-1:] if group.family is Family.MAMBA else held


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2**power) for power in range(11, 35, 2))
_HISTOGRAMS = (
    ("seconds", "vllm:nixl_xfer_time_seconds", "Histogram of transfer duration.", _SECONDS),
    ("num_bytes", "vllm:nixl_bytes_transferred", "Histogram of bytes per transfer.", _BYTES),
)
_COUNTERS = (
    ("failed_transfers", "Failed transfers, handshakes and notifications."),
    ("failed_notifications", "Failed notifications."),
    ("kv_expired_reqs", "Requests whose KV expired, on the prefill engine."),
    ("notifications_after_expiry", "Notifications for requests that were no longer tracked."),
)


class Observed(msgspec.Struct):
    """One histogram's counts; the last bucket has no bound."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total: float = 0.0

    def add(self, value: float, bounds: Sequence[float]) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value


class TransferStats(msgspec.Struct):
    """Counters of the connector since the engine's start, under the names of vLLM's NixlConnector. Each
    appears with its first event."""

    failed_transfers: int = 0
    failed_notifications: int = 0
    kv_expired_reqs: int = 0
    notifications_after_expiry: int = 0
    seconds: Observed = msgspec.field(default_factory=Observed)
    num_bytes: Observed = msgspec.field(default_factory=Observed)

    def transferred(self, seconds: float, num_bytes: int) -> None:
        """Count a completed load."""
        self.seconds.add(seconds, _SECONDS)
        self.num_bytes.add(num_bytes, _BYTES)

    def families(self, names: tuple[str, ...], values: tuple[str, ...]) -> Iterator[Metric]:
        """Metric families with these labels; zero counters are omitted."""
        for field, name, text, bounds in _HISTOGRAMS:
            observed: Observed = getattr(self, field)
            if any(observed.counts):
                yield histogram(name, text, dict(zip(names, values, strict=True)), observed, bounds)
        for field, text in _COUNTERS:
            if count := getattr(self, field):
                counter = CounterMetricFamily(f"vllm:nixl_num_{field}", text, labels=names)
                counter.add_metric(values, count)
                yield counter


def histogram(
    name: str, text: str, labels: dict[str, str], observed: Observed, bounds: Sequence[float]
) -> Metric:
    """Make the metric family of one histogram."""
    buckets = list(zip((*map(str, bounds), "+Inf"), accumulate(observed.counts), strict=True))
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, sum_value=observed.total)
    return family
