"""Names of places that hold blocks. A place is ``GPU``, or a medium outside it: ``CPU`` or ``STORAGE``,
followed by the owner if an event names one (``CPU@kvatlas-host``). Several connectors of one engine may
each hold a copy of a block in the same medium; separate places keep the copies of the others when one
connector drops its copy. A store shared by several engines (``STORAGE``, locality ``REMOTE``, with an
owner) has two places, ``STORAGE*0@owner`` and ``STORAGE*1@owner``, filled alternately: such a store
publishes no evictions, so old entries are expired one place at a time. A store with a feed of its own has
one place, whose name says how engines find blocks there (``Reach``): ``STORAGE*alone0@owner``; so has host
memory of LMCache's connector, of one engine: ``CPU/alone256@lmcache``.
``Plane.medium`` holds a place name; an index does not parse it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvatlas.publisher.events import MEDIA

GPU, CPU, STORAGE = MEDIA

# Names that events use for the engine's own pool.
ON_GPU = frozenset({None, "", GPU, "gpu"})

OWNER_CHARS_MAX = 64
TURNS = (0, 1)

_NAMED = {
    CPU: CPU,
    STORAGE: STORAGE,
    "cpu": CPU,  # LMCache's connector inside vLLM
    # These three: StorageMedium of SGLang 0.5.23, srt/disaggregation/kv_events.py.
    "CPU_PINNED": CPU,
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
# SGLang's host cache and its GPU cache are one tree: a reset empties both.
_CLEARED_WITH_GPU = frozenset({"CPU_PINNED"})

REMOTE = "REMOTE"
# Owner of what LMCache's connector inside vLLM publishes.
LMCACHE = "lmcache"
# Owner of what vLLM's MooncakeStoreConnector publishes: a ``cpu`` chunk that names its group, and no removal
# (mooncake/store/worker.py, 0.32 and 0.33). LMCache's ``cpu`` names none.
MOONCAKE = "mooncake"
_REACH = re.compile(r"(?:STORAGE\*|CPU/)(alone|after)([0-9]+)@")
# Secondary tiers that vLLM's own offloading looks up together with its host memory.
_JOINED_OWNERS = frozenset({"kvcr"})


def medium_named(name: str | None) -> str | None:
    """Map an event's medium name to ``CPU`` or ``STORAGE``; None for an unknown name."""
    return _NAMED.get(name) if name is not None else None


def is_cleared_with_gpu(name: str | None) -> bool:
    """Whether the medium with this name is emptied when an engine clears its cache."""
    return name in _CLEARED_WITH_GPU


def is_remote(medium: str, locality: str | None, ownership: str | None) -> bool:
    """Whether an event describes a store that other engines may read."""
    return medium == STORAGE and locality == REMOTE and bool(ownership)


def place(medium: str, ownership: str | None = None, *, turn: int | None = None) -> str:
    """Build the name of a place; ``turn`` is 0 or 1 for a shared store."""
    name = medium if turn is None else f"{medium}*{turn}"
    return f"{name}@{ownership}" if ownership else name


def medium_of(name: str) -> str:
    """Return ``GPU``, ``CPU`` or ``STORAGE``."""
    return name.partition("@")[0].partition("*")[0].partition("/")[0]


def owner_of(name: str) -> str:
    """Return the owner (connector) of a place; empty if events do not name one."""
    return name.partition("@")[2]


def connector_of(name: str) -> str:
    """Return the connector that looks this place up: its owner, or "" for vLLM's own."""
    owner = owner_of(name)
    return "" if owner in _JOINED_OWNERS else owner


class Reach(NamedTuple):
    """How a connector finds blocks in a place."""

    alone: bool
    """It must hold the whole hit by itself; else what comes before the GPU hit counts as present."""
    chunk_tokens: int
    """Tokens under one key; 0: a block."""


def store_place(owner: str, reach: Reach) -> str:
    """Build the name of the place of a store that has a feed of its own."""
    return f"{STORAGE}*{'alone' if reach.alone else 'after'}{reach.chunk_tokens}@{owner}"


def lmcache_place(chunk_tokens: int) -> str:
    """Build the name of the place of LMCache's chunks in an engine's host memory. Its look-up begins with the
    first token of a prompt."""
    return f"{CPU}/alone{chunk_tokens}@{LMCACHE}"


def reach_of(name: str) -> Reach:
    """Return how the connector of this place finds blocks there; vLLM's own has chunks of its own."""
    found = _REACH.match(name)
    if found is None:
        return Reach(owner_of(name) == MOONCAKE, 0)
    return Reach(found[1] == "alone", int(found[2]))


def is_shared(name: str) -> bool:
    """Whether the place is a store shared by several engines."""
    return "*" in name.partition("@")[0]
