"""Where blocks of an engine can lie, by name.

A place is ``GPU``, or a medium outside it: ``CPU`` or ``STORAGE``, with the owner that an event names
behind it (``CPU@kvatlas-host``). Several connectors of one engine may hold the same block in one medium,
each for itself; as places they are apart, so that what one of them drops the others still hold. A store
that several engines share (``STORAGE``, locality ``REMOTE``, with an owner) has two places,
``STORAGE*0@owner`` and ``STORAGE*1@owner``, filled in turns: nobody tells what such a store evicts, so what
was told long ago goes, a place at a time. Places are what ``Plane.medium`` holds; an index does not look
into them.
"""

from __future__ import annotations

from publisher.events import MEDIA

GPU, CPU, STORAGE = MEDIA

ON_GPU = frozenset({None, "", GPU, "gpu"})
"""How events name the engine's own pool."""

OWNER_CHARS_MAX = 64
TURNS = (0, 1)

_NAMED = {
    CPU: CPU,
    STORAGE: STORAGE,
    "cpu": CPU,  # LMCache's connector inside vLLM
    "CPU_PINNED": CPU,  # these three: StorageMedium of SGLang 0.5.23, srt/disaggregation/kv_events.py
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
_CLEARED_WITH_GPU = frozenset({"CPU_PINNED"})
"""SGLang's host cache is one tree with the GPU's: when that is reset, both are empty."""

_REMOTE = "REMOTE"
_JOINED_OWNERS = frozenset({"kvcr"})
"""Secondary tiers that vLLM's own offloading looks up together with its host memory."""


def medium_named(name: str | None) -> str | None:
    """``CPU`` or ``STORAGE`` for the name that an event has for it; None for any other name."""
    return _NAMED.get(name) if name is not None else None


def is_cleared_with_gpu(name: str | None) -> bool:
    """Whether the medium of this name is emptied too when an engine clears its cache."""
    return name in _CLEARED_WITH_GPU


def is_remote(medium: str, locality: str | None, ownership: str | None) -> bool:
    """Whether an event tells of a store that other engines may read."""
    return medium == STORAGE and locality == _REMOTE and bool(ownership)


def place(medium: str, ownership: str | None = None, *, turn: int | None = None) -> str:
    """The place's name; ``turn`` is 0 or 1 for a shared store."""
    name = medium if turn is None else f"{medium}*{turn}"
    return f"{name}@{ownership}" if ownership else name


def medium_of(name: str) -> str:
    """``GPU``, ``CPU`` or ``STORAGE``."""
    return name.partition("@")[0].partition("*")[0]


def owner_of(name: str) -> str:
    """Whose connector holds it; empty where the events do not say."""
    return name.partition("@")[2]


def connector_of(name: str) -> str:
    """What stands for the connector that looks this place up: its owner, or nothing for vLLM's own."""
    owner = owner_of(name)
    return "" if owner in _JOINED_OWNERS else owner


def is_shared(name: str) -> bool:
    """Whether it is a store that several engines share."""
    return "*" in name.partition("@")[0]
