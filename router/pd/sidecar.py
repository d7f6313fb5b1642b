"""What an endpoint picker and the sidecar of a decode engine tell each other, in header fields.

The request names the engines that may compute the prompt, the best one first: the field of llm-d, whose
sidecar reads it too. The answer says which of them did; other sidecars say nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

PREFILLERS: Final = b"x-prefiller-host-port"
"""Field of a request: ``HOST:PORT``, or several with commas between them."""
PREFILLED: Final = b"x-kvatlas-prefilled"
"""Field of an answer: place in that list and ``cached_tokens`` there, or a dash for either."""
RANK: Final = b"x-data-parallel-rank"
"""Field of a request: the rank of the engine that answers, which says nothing to the other one."""
_NAMED_MAX: Final = 8
_ENDPOINT: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z][0-9A-Za-z.-]{0,252}):[0-9]{1,5}")
_TOLD: Final = re.compile(rb"([0-9]{1,3}|-) ([0-9]{1,9}|-)")
_NONE: Final = b"- -"


class Prefilled(NamedTuple):
    """``place`` None: who answered computed the prompt itself. ``cached_tokens`` None: not known."""

    place: int | None
    cached_tokens: int | None


def read_prefillers(fields: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The endpoints named, in order, without what is none; at most 8 are looked at."""
    given = [value for name, value in fields if name == PREFILLERS]
    texts = [text.strip() for text in b",".join(given).decode("latin-1").split(",", _NAMED_MAX)[:_NAMED_MAX]]
    return list(dict.fromkeys(text for text in texts if _ENDPOINT.fullmatch(text)))


def tell(prefilled: Prefilled) -> tuple[bytes, bytes]:
    """The field that says so."""
    if prefilled.place is None:
        return PREFILLED, _NONE
    cached = b"-" if prefilled.cached_tokens is None else b"%d" % prefilled.cached_tokens
    return PREFILLED, b"%d %b" % (prefilled.place, cached)


def read_prefilled(fields: Iterable[tuple[bytes, bytes]]) -> Prefilled | None:
    """What an answer says; None: nothing, or nothing that can be read."""
    value = next((value for name, value in fields if name == PREFILLED), b"")
    found = _TOLD.fullmatch(value)
    if found is None:
        return None
    place, cached = (None if part == b"-" else int(part) for part in found.groups())
    return Prefilled(place, None if place is None else cached)
