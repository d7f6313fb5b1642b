"""Assignment of engines to replicas: each replica computes it from state that all replicas share. There is no
coordinator. Engines without holder are assigned, one after the other, to the live replica that can follow
the engine and holds fewest; every replica computes the same assignment and acquires its own part, and if
their views differ the lease decides. A replica that holds at least two more than another releases one that
the other can follow, one at a time. Pure functions. An engine that a live replica can follow eventually
gets a holder, even if views differ (after ``patience_s`` any replica acquires it); without external changes
the assignment becomes stable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import xxhash


class Member(msgspec.Struct, frozen=True):
    """A live replica: the engines it can follow, and the number it follows."""

    wants: Collection[str]
    held: int = 0


class Assignment(msgspec.Struct, frozen=True):
    """Actions of one round: ids of the leases to acquire, and the one to release."""

    acquire: tuple[str, ...] = ()
    release: str | None = None


def plan_assignment(
    me: str,
    holder_of: Mapping[str, str | None],
    members: Mapping[str, Member],
    *,
    free_s: Mapping[str, float],
    patience_s: float,
) -> Assignment:
    """Return the leases that replica ``me`` has to acquire and to release.

    Args:

      holder_of: The engines this replica can follow, and the holder of each.

      members: All live replicas, this one included.

      free_s: Seconds since each engine has been without holder.
    """
    free = sorted(engine for engine, holder in holder_of.items() if holder is None)
    assigned = _assign_free(free, members)
    acquire = tuple(e for e in free if assigned.get(e) == me or free_s.get(e, 0.0) >= patience_s)
    mine = [engine for engine, holder in holder_of.items() if holder == me]
    return Assignment(acquire, None if acquire else _to_release(me, mine, members))


def _assign_free(free: list[str], members: Mapping[str, Member]) -> dict[str, str]:
    """Return engine without holder -> replica that has to acquire it."""
    held = {replica: member.held for replica, member in members.items()}
    assigned = {}
    for engine in free:
        who = [replica for replica, member in members.items() if engine in member.wants]
        if who:
            taker = min(who, key=lambda replica: (held[replica], _weight(replica, engine)))
            held[taker] += 1
            assigned[engine] = taker
    return assigned


def _to_release(me: str, mine: list[str], members: Mapping[str, Member]) -> str | None:
    """Return one of ``mine`` that a replica with at least two fewer can follow; None if there is none."""
    less_loaded = [
        member for replica, member in members.items() if replica != me and member.held + 2 <= len(mine)
    ]
    for engine in sorted(mine, key=lambda engine: _weight(me, engine)):
        if any(engine in member.wants for member in less_loaded):
            return engine
    return None


def _weight(replica: str, engine: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{replica}\n{engine}".encode())
