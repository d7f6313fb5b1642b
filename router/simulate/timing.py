"""How long an engine takes: the whole timing model, in seconds.

A chunk of ``n`` prompt tokens beside ``r`` sequences that are generating takes::

    chunk_s + prefill_s_per_token * n + interference_s * r

Prompts are computed one after the other in the order of their arrival, in chunks of at most ``chunk_tokens``;
every sequence that generates makes one token per ``decode_s``. ``request_s`` is the way to the engine and
back: it comes on top of every time to first token and keeps no engine busy. At most ``seqs_max`` requests are
on an engine at once. ``stall_share`` is how much of a chunk's time those that generate lose, but for the one
token that each step gives them: 1 as in vLLM, where all of a step's tokens come at its end; 0, the default,
where only times to first token are looked at. This leaves out what attention's quadratic part and the batch
add; ``fit`` finds the values that come closest to what an engine was seen to do.
"""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults: an engine that prefills 8,000 tokens a second and decodes 50 tokens a second per sequence."""

    prefill_s_per_token: float = 1 / 8000
    request_s: float = 0.0
    chunk_s: float = 0.0
    interference_s: float = 0.0
    decode_s: float = 0.02
    stall_share: float = 0.0
    chunk_tokens: int = 8192
    seqs_max: int = 64

    def __post_init__(self) -> None:
        for name in ("prefill_s_per_token", "decode_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds above 0, got {getattr(self, name)}")
        for name in ("request_s", "chunk_s", "interference_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds, not negative, got {getattr(self, name)}")
        if not 0 <= self.stall_share <= 1:
            raise ValueError(f"stall_share must be 0 to 1, got {self.stall_share}")
        for name in ("chunk_tokens", "seqs_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def chunk_seconds(self, tokens: int, generating: int) -> float:
        return self.chunk_s + self.prefill_s_per_token * tokens + self.interference_s * generating

    def stall_s(self, chunk_seconds: float) -> float:
        """How much later the tokens of an answer come for a chunk beside them."""
        return self.stall_share * max(0.0, chunk_seconds - self.decode_s)
