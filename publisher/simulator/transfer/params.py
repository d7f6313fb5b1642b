"""``kv_transfer_params``: what a request asks of the connector, and what a prefill engine answers.

Field for field as vLLM 0.30 to 0.33 with NixlConnector in pull mode. Nothing is checked beyond the types, as
the engine checks nothing: what is missing shows in what happens (``KvConnector``). ``transfer_id`` and
``remote_bootstrap_addr`` are of MooncakeConnector, ``remote_decoder`` and ``remote_prefiller`` of
OffloadingConnector.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from publisher.groups import Family, GroupSpec

Json = dict[str, Any]


class Fault(StrEnum):
    """What parameters that no prefill engine gave do to a real engine."""

    ENDS = "ends"
    """No block ids: an assertion fails in the scheduler and the server is gone."""
    HANGS = "hangs"
    """No address to read from: the request waits for ever, and the engine dies when its client leaves."""


class TransferParams(msgspec.Struct, kw_only=True):
    """Parameters of one request."""

    do_remote_decode: bool = False
    """Compute, keep the blocks, and say where they are."""
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

    @property
    def address(self) -> tuple[str, int]:
        """Where the other engine's side channel listens."""
        return self.remote_host or "", self.remote_port or 0

    @property
    def source(self) -> str:
        """Whom the blocks come from, for the log."""
        return self.remote_bootstrap_addr or f"{self.remote_host}:{self.remote_port}"


def handed_over(
    *,
    request_id: str,
    engine_id: str,
    address: tuple[str, int],
    block_ids: list[list[int]],
    num_tokens: int,
    cached_tokens: int,
    release: tuple[int, int],
) -> Json:
    """``kv_transfer_params`` of a prefill engine's answer; ``release`` is its vLLM's."""
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


def exchanged(group: GroupSpec, table: list[int]) -> list[int]:
    """Which blocks of a request's table are moved: a window's last ones, a Mamba group's state."""
    held = [block for block in table if block]
    if group.family is Family.WINDOW:
        num_blocks = math.ceil((group.sliding_window or 1) / group.block_size) + 1
        return held[-num_blocks:]
    return held[-1:] if group.family is Family.MAMBA else held
