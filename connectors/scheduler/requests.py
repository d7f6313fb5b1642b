"""What the scheduler's half remembers of a request, and what it reads of the engine's own object for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineRequest(Protocol):
    """The part of vLLM's ``Request`` that is read here; nothing of it is ever written."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    """Counts what steps under way will compute; 0 again after a preemption or a failed load."""
    shared_prefix_boundary: int
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One full hash per hash block of known tokens."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True)
class RequestState:
    """One live request. Token positions count from its first token."""

    request: EngineRequest
    next_token: int = 0
    """Blocks that end here or before were stored, or tried and given up."""
    refused_blocks: int = 0
    """Blocks the pin cap kept from being stored; they are tried again in the request's next step."""
    num_local_tokens: int = 0
    """The local hit named in the last look-up: the load that follows begins there."""
    offered_token: int = 0
    """Blocks that end here or before were counted by ``StoreThreshold``."""
    must_compute: bool = False
    """A load failed since the request was last admitted: it is not offered another before it has run."""
