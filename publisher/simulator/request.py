"""One generation as a simulated engine's scheduler sees it."""

from __future__ import annotations

from typing import Literal, Protocol

from publisher.block_hash import NO_EXTRAS, PromptExtras
from publisher.simulator.transfer.params import Json, TransferParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampler(Protocol):
    """Where a request's output tokens come from."""

    def token(self, index: int, *, ignore_eos: bool) -> int:
        """The ``index``-th output token; asked for in order, once each."""


class SimRequest:
    """One generation: its prompt, its limits, and how far it got. ``cached_tokens`` None until admitted."""

    __slots__ = (
        *("arrival_s", "cached_tokens", "eos_id", "extras", "finish_reason", "handed", "ignore_eos"),
        *("loaded_to", "max_tokens", "output", "priority", "prompt", "reported_hit", "request_id", "sampler"),
        "transfer",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampler: Sampler,
        *,
        max_tokens: int,
        eos_id: int,
        extras: PromptExtras = NO_EXTRAS,
        ignore_eos: bool = False,
        transfer: TransferParams | None = None,
        priority: int = 0,
    ) -> None:
        if not prompt or max_tokens < 1:
            raise ValueError(f"{request_id}: needs a prompt and max_tokens >= 1, got {max_tokens}")
        self.request_id = request_id
        self.prompt = prompt
        self.sampler = sampler
        self.max_tokens = max_tokens
        self.eos_id = eos_id
        self.extras = extras
        self.ignore_eos = ignore_eos
        self.output: list[int] = []
        self.cached_tokens: int | None = None
        self.loaded_to = 0
        """Tokens from the start that need no computing, as they were loaded."""
        self.finish_reason: FinishReason | None = None
        self.arrival_s = 0.0
        self.priority = priority
        self.reported_hit: int | None = None
        """What the answer says of its hit instead of its own: that of the engine that computed the prompt."""
        self.transfer = transfer
        """What is asked of the connector; None where nothing is, or no more."""
        self.handed: Json | None = None
        """``kv_transfer_params`` of the answer: where what was computed for another engine waits."""
