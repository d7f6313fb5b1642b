"""What simulated engines say to each other on the side channel."""

from __future__ import annotations

import msgspec


class Shake(msgspec.Struct, frozen=True, tag=True):
    """Who is asked for, and what both sides must have in common."""

    engine_id: str
    common: str


class Take(msgspec.Struct, frozen=True, tag=True):
    """Whether the blocks of this transfer are there; answered once they are, or the time is over."""

    transfer_id: str
    common: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """The blocks of this request have been read, for a prompt of this ``digest`` up to token ``end``; 0: they
    are not wanted."""

    request_id: str
    end: int = 0
    digest: int = 0


class Alive(msgspec.Struct, frozen=True, tag=True):
    """These requests are still wanted."""

    request_ids: list[str]


class Reply(msgspec.Struct, frozen=True):
    """``error``: it refuses; ``intact``: the blocks still held what was computed."""

    error: str = ""
    intact: bool = True


Message = Shake | Take | Read | Alive
