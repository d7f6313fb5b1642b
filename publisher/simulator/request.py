"""One generation of a simulated engine."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvatlas.publisher.block_hash import NO_EXTRAS, PromptExtras
from kvatlas.publisher.pool.host_tier import HeldKey
from kvatlas.publisher.simulator.kv_messages import Json, TransferParams
from kvatlas.publisher.simulator.tokenizer import AnswerText

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampler(Protocol):
    """Source of a request's output tokens."""

    def token(self, index: int, *, ignore_eos: bool) -> int:
        """The ``index``-th output token; called in order, once each."""


class SimRequest(msgspec.Struct, eq=False):
    """One generation: its prompt, limits and progress."""

    request_id: str
    prompt: list[int]
    sampler: Sampler
    max_tokens: int
    eos_id: int
    extras: PromptExtras = NO_EXTRAS
    ignore_eos: bool = False
    min_tokens: int = 0
    text: AnswerText | None = None
    transfer: TransferParams | None = None
    """Parameters for the connector; None without any, or after they were used."""
    priority: int = 0
    session_id: str | None = None
    output: list[int] = []
    cached_tokens: int | None = None
    """None until it is admitted."""
    loaded_to: int = 0
    """Tokens from the start that were loaded and need no computation."""
    found: frozenset[HeldKey] | None = None
    """Blocks that another engine's host memory holds; None: it has not been asked."""
    finish_reason: FinishReason | None = None
    arrival_s: float = 0.0
    reported_hit: int | None = None
    """Hit of the engine that computed the prompt, which the answer reports instead of this engine's."""
    handed: Json | None = None
    """``kv_transfer_params`` of the answer: the address of the blocks computed for another engine."""

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1:
            raise ValueError(f"{self.request_id}: needs a prompt and max_tokens >= 1, got {self.max_tokens}")

    def next_token(self) -> int:
        """The output token after those so far."""
        count = len(self.output)
        return self.sampler.token(count, ignore_eos=self.ignore_eos or count < self.min_tokens)
