"""What a gateway is told of a choice: the destination, twice, and what else changes in the request's head.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from router.epp.fields import DESTINATION, Header, changes
from router.epp.wire import messages as m
from router.fleet.identity import endpoint_of
from router.proxy.attempt import Attempt

_DESTINATION = DESTINATION.encode()


def destination(attempt: Attempt, fallbacks: int) -> str:
    """The endpoint chosen, and those behind it in order."""
    if not fallbacks:
        return endpoint_of(attempt.base_url)
    return ",".join(dict.fromkeys(map(endpoint_of, (attempt.base_url, *attempt.next_best(fallbacks)))))


def told(
    head: list[Header],
    wanted: Iterable[Header],
    attempt: Attempt,
    fallbacks: int,
    *,
    length: int | None = None,
    target: bytes | None = None,
) -> tuple[bytes, bytes]:
    """The header mutation and the metadata by which ``head`` becomes ``wanted`` with the engine's own fields.
    ``length`` is that of a buffered body that is changed: Envoy compares. ``target``: path and query, where
    they are not those that came."""
    to = destination(attempt, fallbacks)
    own = dict(attempt.engine_headers)
    if own:
        wanted = [*(field for field in wanted if field[0] not in own), *own.items()]
    sets, removes = changes(head, wanted)
    if length is not None:
        sets.append((b"content-length", b"%d" % length))
    if target is not None:
        sets.append((b":path", target))
    mutation, metadata = _named(to)
    return m.header_mutation(sets, removes) + mutation, metadata


@lru_cache(maxsize=4096)
def _named(to: str) -> tuple[bytes, bytes]:
    """The header and the metadata that name this destination."""
    return m.header_mutation([(_DESTINATION, to.encode())]), m.dynamic_metadata(m.LB, DESTINATION, to)
