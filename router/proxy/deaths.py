"""Request bodies that were on an engine when it died, so that none of them ends one engine after another.

A request that was on an engine when the connection broke, or that it answered with 500, may have ended it:
the next engine would end too, and so would those that get the client's next attempts. So the router asks
whether the engine is alive before it asks another one. If it is not, the body is a suspect for
``proxy.suspect_s``: it is given to no engine before the last one that died with it is known to be alive, or
has left the fleet, and to none at all after two deaths. Routers tell each other (``replication/gossip``); a
whole answer clears it.

Invariants: a body is known by a digest with its tenant, which no other tenant's body can meet by intent;
requests with one body that one engine had at one time see one death, however late they fail; the memory is
bounded, and forgets the oldest first.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import xxhash

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.http.upstream_pool import UpstreamClient
from kvatlas.router.openai.errors import ApiError, ends_engines, engine_died
from kvatlas.router.proxy.headers import request_head
from kvatlas.router.proxy.settings import ProxyStats

DIGEST_BYTES = 16
HELD_BACK = frozenset({"engine_died", "request_ends_engines"})
"""Codes of the errors for what is given to no engine."""
_SUSPECTS_MAX = 8192
_DEATHS_MAX = 2
# One engine does not die twice within this time, for all that other routers say: they do not tell when the
# request was sent.
_SAME_DEATH_S = 5.0
# An engine that was found dead counts as dead for this long.
_KNOWN_S = 0.5
_RETRY_S = 5
_PULSE_S = 5.0
_SERVER_ERRORS = 500


def digest_of(tenant: str, path: str, body: bytes) -> bytes:
    """Return the name of a client's request, as it came: what the router adds differs between attempts."""
    digest = xxhash.xxh3_128(f"{len(tenant)}:{tenant}{path}\0".encode("utf-8", "surrogatepass"))
    digest.update(body)
    return digest.digest()


class Suspect(msgspec.Struct, gc=False):
    """One body. Times are monotonic seconds."""

    engine_id: str
    """The last engine that died with it."""
    at_s: float
    """When that was."""
    deaths: int = 1
    came_back: bool = False
    """That engine has been seen alive since, or another one has been given it."""


class Suspects:
    """The memory. Pure."""

    def __init__(self, stats: ProxyStats) -> None:
        self._stats = stats
        self._by_digest: OrderedDict[bytes, Suspect] = OrderedDict()
        """The one that died last is the last."""
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._by_digest)

    def died(self, digest: bytes, engine_id: str, now: float, sent_s: float | None = None) -> bool:
        """Note that this body was on an engine when it died. ``sent_s``: since when; one that was there
        before a death that is known saw that one, however late it fails. Returns whether that is news."""
        known = self._by_digest.get(digest)
        if known is None:
            self._by_digest[digest] = Suspect(engine_id, now)
            self._stats.suspects_noted += 1
            if len(self._by_digest) > _SUSPECTS_MAX:
                self._by_digest.popitem(last=False)
                self._stats.suspects_forgotten += 1
        elif known.engine_id != engine_id or (
            known.came_back or now - known.at_s > _SAME_DEATH_S if sent_s is None else sent_s > known.at_s
        ):
            self._by_digest[digest] = Suspect(engine_id, now, known.deaths + 1)
            self._by_digest.move_to_end(digest)
        else:
            return False
        self._count()
        return True

    def waits(self, bodies: int) -> bool:
        """``bodies`` more wait for a look at their engine (below 0: fewer). Returns whether there is room."""
        if self._waiting + bodies > _SUSPECTS_MAX:
            self._stats.suspects_forgotten += bodies
            return False
        self._waiting += bodies
        self._count()
        return True

    def find(self, digest: bytes, now: float, kept_s: float) -> Suspect | None:
        """Return what is known of a body; None: nothing speaks against it."""
        suspects = self._by_digest
        while suspects and now - next(iter(suspects.values())).at_s >= kept_s:
            suspects.popitem(last=False)
        self._count()
        return suspects.get(digest)

    def clear(self, digest: bytes) -> None:
        """An engine has answered it, to the end."""
        self._by_digest.pop(digest, None)
        self._count()

    def _count(self) -> None:
        self._stats.suspects_current = len(self._by_digest) + self._waiting


class WatchedFleet(Protocol):
    """The engines, as far as their ends are concerned."""

    def base_url(self, engine_id: str) -> str | None:
        """Return where an engine is asked; None: it is not in the fleet."""

    def leaves(self, engine_id: str) -> bool:
        """Whether it was to go, or to sleep: its end says nothing of its requests."""


class Pulse:
    """Looks whether an engine answers, over the proxy's own connections."""

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    async def __call__(self, base_url: str) -> bool | None:
        """Whether ``/health`` is answered without an error of the engine's; vLLM answers 503 there as soon as
        its core is dead. None: our own limits allow no look at it."""
        origin = self._client.origin(base_url)
        head = request_head(
            "GET", origin.path_prefix + b"/health", origin.host_header, [], own=(), length=None
        )
        try:
            # A server that is ending may still answer on connections that it has.
            answer = await self._client.request(origin, "GET", head, b"", _PULSE_S, fresh=True)
        except UpstreamError as error:
            return None if error.reason == "overflow" else False
        self._client.release(answer)
        return answer.status < _SERVER_ERRORS


class _Look(msgspec.Struct, gc=False):
    """One look at an engine."""

    done: asyncio.Event
    at_s: float = 0.0
    """When it began."""
    alive: bool | None = None
    """None: not known."""
    bodies: dict[bytes, float] = msgspec.field(default_factory=dict)
    """Digests of bodies that may have ended it, with the time of the last send, until the look is done."""


class Deaths:
    """Asks engines whether they are alive, and holds back what may have ended them. ``alive``: whether one
    answers, by base URL, or None where that is not known; it may take a moment, and never raises."""

    def __init__(
        self,
        fleet: WatchedFleet,
        alive: Callable[[str], Awaitable[bool | None]],
        stats: ProxyStats,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._pulse = alive
        self._stats = stats
        self._clock = clock
        self.suspects = Suspects(stats)
        self.publish: Callable[[str, bytes], object] = lambda engine_id, digest: None
        """Tells other routers that an engine died with this body."""
        self._looks: dict[str, _Look] = {}
        """By engine: the one that goes on, or the last one, which found it dead a moment ago."""
        self._later: dict[str, _Look] = {}
        """The one after it."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By engine, while there are looks to be had: they go on without the clients."""

    def close(self) -> None:
        """End all looks: nothing is known of their engines."""
        for task in self._tasks.values():
            task.cancel()

    def learn(self, engine_id: str, digest: bytes) -> None:
        """Another router says that this body was on an engine when it died."""
        if self.suspects.died(digest, engine_id, self._clock()):
            self._stats.suspects_learned += 1

    def failed(self, digest: bytes, engine_id: str, sent_s: float) -> _Look | None:
        """This body's request, which an engine has had since ``sent_s``, failed there in a way that may be
        its death. Returns the look at it, which needs no waiting for; None: there is none."""
        if self._fleet.leaves(engine_id):
            return None
        look = self._look(engine_id)
        if digest not in look.bodies and not self.suspects.waits(1):
            return look
        look.bodies[digest] = max(sent_s, look.bodies.get(digest, sent_s))
        if look.done.is_set():
            self._settle(engine_id, look)
        return look

    async def ended(self, digest: bytes, engine_id: str, sent_s: float) -> bool:
        """Wait for what ``failed`` looks for. Returns whether the engine is dead."""
        look = self.failed(digest, engine_id, sent_s)
        return look is not None and await _alive(look) is False

    def cleared(self, digest: bytes) -> None:
        """An engine has answered this body, to the end."""
        self.suspects.clear(digest)
        for look in self._pending():
            self.suspects.waits(-(look.bodies.pop(digest, None) is not None))

    def restarted(self, digest: bytes, engine_id: str, sent_s: float) -> None:
        """The process that has had this body since ``sent_s`` is gone: another one runs there now, or polls
        get no answer. The body may have ended it: another engine gets it, and a second death counts."""
        if self._fleet.leaves(engine_id):
            return
        now = self._clock()
        if self.suspects.died(digest, engine_id, now, sent_s):
            self.publish(engine_id, digest)
        known = self.suspects.find(digest, now, math.inf)
        if known is not None and known.engine_id == engine_id:
            known.came_back = True

    def holds(self, digest: bytes, kept_s: float) -> bool:
        """Whether ``check`` would refuse this body, or ask an engine."""
        return bool(self._looked_at(digest)) or self._against(digest, self._clock(), kept_s) is not None

    async def check(self, digest: bytes, kept_s: float) -> None:
        """Raise ``ApiError`` if this body must be given to no engine now."""
        for look in self._looked_at(digest):
            await look.done.wait()
        now = self._clock()
        known = self._against(digest, now, kept_s)
        if known is None:
            return
        if known.deaths >= _DEATHS_MAX:
            self._refuse("twice")
            raise ends_engines(known.at_s + kept_s - now)
        # One that has left, as a pod that was replaced, never comes back under its id.
        gone = self._fleet.base_url(known.engine_id) is None
        if not gone and not await _alive(self._look(known.engine_id)):
            raise self.held_back()
        known.came_back = True

    def _looked_at(self, digest: bytes) -> list[_Look]:
        """The looks at engines that this body may have ended."""
        return [one for one in self._pending() if digest in one.bodies]

    def _against(self, digest: bytes, now: float, kept_s: float) -> Suspect | None:
        """Return what speaks against giving this body to an engine now."""
        known = self.suspects.find(digest, now, kept_s)
        if known is not None and known.came_back and known.deaths < _DEATHS_MAX:
            return None
        return known

    def held_back(self) -> ApiError:
        """Return the error for a suspect whose engine is not known to be alive."""
        self._refuse("waits")
        return engine_died(_RETRY_S)

    def _refuse(self, reason: str) -> None:
        counts = self._stats.suspects_refused
        counts[reason] = counts.get(reason, 0) + 1

    def _pending(self) -> list[_Look]:
        return [look for looks in (self._looks, self._later) for look in looks.values()]

    def _look(self, engine_id: str) -> _Look:
        """The look that tells whether it is alive now. An engine dies with all its requests, which share the
        looks at it; what a look from before this was asked says counts only if the engine was dead."""
        before = self._looks.get(engine_id)
        if before is not None and before.done.is_set() and self._clock() - before.at_s <= _KNOWN_S:
            return before
        look = self._later.get(engine_id)
        if look is None:
            look = self._later[engine_id] = _Look(asyncio.Event())
            if engine_id not in self._tasks:
                self._tasks[engine_id] = asyncio.create_task(self._watch(engine_id))
        return look

    async def _watch(self, engine_id: str) -> None:
        """Look at one engine, as long as a look at it is asked for."""
        try:
            while (look := self._later.pop(engine_id, None)) is not None:
                look.at_s = self._clock()
                self._looks[engine_id] = look
                base_url = self._fleet.base_url(engine_id)
                look.alive = False if base_url is None else await self._pulse(base_url)
                self._settle(engine_id, look)
                if look.alive is False and (later := self._later.pop(engine_id, None)) is not None:
                    later.at_s, later.alive = look.at_s, False
                    self._settle(engine_id, later)
        finally:
            del self._tasks[engine_id]
            for looks in (self._looks, self._later):
                if (left := looks.get(engine_id)) is not None and not left.done.is_set():
                    del looks[engine_id]
                    self._settle(engine_id, left)
            self._forget(self._clock())

    def _settle(self, engine_id: str, look: _Look) -> None:
        """Note what this look found."""
        bodies, look.bodies = look.bodies, {}
        self.suspects.waits(-len(bodies))
        now = self._clock()
        for digest, sent_s in bodies.items() if look.alive is False else ():
            if self.suspects.died(digest, engine_id, now, sent_s):
                self.publish(engine_id, digest)
        look.done.set()

    def _forget(self, now: float) -> None:
        for name in [
            one
            for one, look in self._looks.items()
            if look.done.is_set() and (look.alive is not False or now - look.at_s > _KNOWN_S)
        ]:
            del self._looks[name]


async def _alive(look: _Look) -> bool | None:
    await look.done.wait()
    return look.alive
