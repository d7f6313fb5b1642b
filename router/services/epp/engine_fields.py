"""Parts of the message with which the gateway learns the choice: the destination as header and as metadata,
and changes to the request's head.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.http.client_head import Header
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.header_fields import DESTINATION, changes

_DESTINATION = DESTINATION.encode()


def destination(attempt: Attempt, fallbacks: int) -> str:
    """Return the chosen endpoint and its fallbacks, in order."""
    if not fallbacks:
        return endpoint_of(attempt.base_url)
    return ",".join(dict.fromkeys(map(endpoint_of, (attempt.base_url, *attempt.next_best(fallbacks)))))


def request_changes(
    head: list[Header],
    wanted: Iterable[Header],
    attempt: Attempt,
    fallbacks: int,
    *,
    length: int | None = None,
    target: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Return the header mutation and the metadata that turn ``head`` into ``wanted`` with the engine's own
    fields. ``length``: that of a changed buffered body, which Envoy compares. ``target``: path and query, if
    changed."""
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
    """Return the header and the metadata that name this destination."""
    return m.header_mutation([(_DESTINATION, to.encode())]), m.dynamic_metadata(m.LB, DESTINATION, to)
