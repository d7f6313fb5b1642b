"""Which engines a replica follows: its own decision, from state that all replicas share.

No replica is told by another. Engines that nobody follows are dealt out, one after the other, to the live
replica that wants it and has fewest; every replica deals from the same picture and takes what falls to
itself, and where pictures differ the lease decides. Who has two more than another that wants one of them
gives it away, one at a time. Pure. Always true: an engine that a live replica wants is followed by one in the
end, also where pictures differ (after ``patience_s`` anybody takes it); when nothing changes outside, moves
end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import xxhash


class Member(msgspec.Struct, frozen=True):
    """A live replica: the engines it would follow, and how many it follows."""

    wants: Collection[str]
    held: int = 0


class Assignment(msgspec.Struct, frozen=True):
    """What to do now, engine ids."""

    take: tuple[str, ...] = ()
    give: str | None = None


def divide(
    me: str,
    holder_of: Mapping[str, str | None],
    members: Mapping[str, Member],
    *,
    free_s: Mapping[str, float],
    patience_s: float,
) -> Assignment:
    """What replica ``me`` is to take and to give away.

    ``holder_of``: the engines this replica wants, and which replica holds each. ``members``: all live
    replicas, this one among them. ``free_s``: for how long an engine has been without holder, in seconds.
    """
    free = sorted(engine for engine, holder in holder_of.items() if holder is None)
    dealt = _deal(free, members)
    take = tuple(e for e in free if dealt.get(e) == me or free_s.get(e, 0.0) >= patience_s)
    mine = [engine for engine, holder in holder_of.items() if holder == me]
    return Assignment(take, None if take else _surplus(me, mine, members))


def _deal(free: list[str], members: Mapping[str, Member]) -> dict[str, str]:
    """Who is to take each free engine."""
    held = {replica: member.held for replica, member in members.items()}
    dealt = {}
    for engine in free:
        who = [replica for replica, member in members.items() if engine in member.wants]
        if who:
            taker = min(who, key=lambda replica: (held[replica], _weight(replica, engine)))
            held[taker] += 1
            dealt[engine] = taker
    return dealt


def _surplus(me: str, mine: list[str], members: Mapping[str, Member]) -> str | None:
    """One of mine that a replica with at least two less wants; None where there is no such replica."""
    poorer = [member for replica, member in members.items() if replica != me and member.held + 2 <= len(mine)]
    for engine in sorted(mine, key=lambda engine: _weight(me, engine)):
        if any(engine in member.wants for member in poorer):
            return engine
    return None


def _weight(replica: str, engine: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{replica}\n{engine}".encode())
