"""Features needed for exact routing that older vLLM releases lack."""

from __future__ import annotations

import msgspec

from kvatlas.router.fleet.versions import Version

EVENT_SOURCES_SINCE: Version = (0, 31, 0)
FIXED_SEED_SINCE: Version = (0, 29, 0)
MAP_ENCODING_SINCE: Version = (0, 24, 0)
NEWEST_KNOWN = (0, 33)


class MissingFeature(msgspec.Struct, frozen=True):
    """A feature missing before release ``since``; ``severe`` if predictions suffer without the remedy."""

    since: Version
    description: str
    remedy: str
    severe: bool


MISSING_FEATURES = (
    MissingFeature(
        (0, 20, 0),
        "events do not name the KV cache group, so models with several groups cannot be predicted",
        "upgrade to 0.24 or later, or serve single-group models only",
        severe=True,
    ),
    MissingFeature(
        (0, 22, 0),
        "events do not carry kind and window of a group",
        "upgrade, or set models.NAME.kinds and models.NAME.windows",
        severe=True,
    ),
    MissingFeature(
        MAP_ENCODING_SINCE,
        "events are arrays; with unequal block sizes large blocks are hashed differently",
        "upgrade, or serve models whose groups have equal block sizes",
        severe=False,
    ),
    MissingFeature(
        FIXED_SEED_SINCE,
        "the hash seed is random unless PYTHONHASHSEED is set",
        "set the same PYTHONHASHSEED for all engines and name it in models.NAME.hash_seeds",
        severe=False,
    ),
    MissingFeature(
        EVENT_SOURCES_SINCE,
        "no /kv_event_sources, and LoRA and salt keys are hashed in the old way",
        "give events= and replay= with each --engine",
        severe=False,
    ),
)


def missing_features(version: Version) -> list[MissingFeature]:
    """Return the features that this release lacks."""
    return [lack for lack in MISSING_FEATURES if version < lack.since]
