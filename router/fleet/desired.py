"""The desired set of engines: merges the sets of all sources with an administrator's decisions.

Pure bookkeeping. Rules, in this order:

- A server that an administrator removed stays out until it is added again, or until no source lists it any
  more: later, another pod at the same address is another server.
- A server listed by several sources has the engines and addresses of the first source in ``ORDER``.
- It gets new requests unless a source, or an administrator, holds it.
- It leaves when no source lists it any more. A server that an administrator drained stays drained until it is
  undrained or leaves.

Invariant: below ``engines_max`` servers, the sources' latest sets determine the result, regardless of the
order in which they arrived. At the limit, admitted servers stay and further ones are refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import msgspec

from router.fleet.identity import DiscoveredEngine, EngineAddress

ADMIN, STATIC = "admin", "static"
ORDER = (ADMIN, STATIC, "file", "kubernetes", "dns")


class DesiredFleet(msgspec.Struct, frozen=True):
    """The desired fleet. ``holds``: engine id or base URL -> why it gets no new requests;
    ``identities``: base URL -> who is there."""

    engines: tuple[EngineAddress, ...] = ()
    holds: dict[str, str] = {}
    identities: dict[str, str] = {}


class Override(msgspec.Struct, frozen=True):
    """Decision of an administrator about a server: the administrator, and the server's identity at that
    time.
    """

    by: str
    identity: str = ""


class AdminDecisions(msgspec.Struct, frozen=True):
    """All decisions of administrators."""

    added: tuple[EngineAddress, ...] = ()
    removed: dict[str, Override] = {}
    drained: dict[str, Override] = {}

    @property
    def any(self) -> bool:
        """Whether there is a decision."""
        return bool(self.added or self.removed or self.drained)


class FleetFullError(Exception):
    """The fleet already has ``engines_max`` servers."""


class DesiredState:
    """Merged state of all sources and administrators."""

    def __init__(self, *, engines_max: int) -> None:
        # Base URLs of servers kept out although a source names them.
        self.removed: dict[str, Override] = {}
        # By engine id, or by base URL for all its engines.
        self.drained: dict[str, Override] = {}
        # Servers for which there is no room now.
        self.left_out = 0
        self.engines_max = engines_max
        self._by_source: dict[str, dict[str, list[DiscoveredEngine]]] = {}
        self._admitted: dict[str, None] = {}  # servers, in the order they came

    def set_source(self, source: str, discovered: Sequence[DiscoveredEngine]) -> None:
        """Replace the set of engines that ``source`` names."""
        by_url: dict[str, list[DiscoveredEngine]] = {}
        for one in discovered:
            by_url.setdefault(one.engine.base_url, []).append(one)
        self._by_source[source] = by_url
        self._admit()

    def sources(self, base_url: str) -> list[str]:
        """Return the sources that name a server."""
        return [source for source in ORDER if base_url in self._by_source.get(source, {})]

    # -- an administrator -------------------------------------------------------------------------------

    def add(self, engine: EngineAddress) -> bool:
        """Add an administrator's engine, new or with new addresses. Returns False if it exists unchanged.

        Raises ``FleetFullError``.
        """
        base_url = engine.base_url
        if base_url not in self._admitted and len(self._admitted) >= self.engines_max:
            raise FleetFullError
        back = self.removed.pop(base_url, None) is not None
        own = self._by_source.setdefault(ADMIN, {})
        kept = [s for s in own.get(base_url, []) if s.engine.engine_id != engine.engine_id]
        same = DiscoveredEngine(engine) in own.get(base_url, [])
        alike = [s for s in kept if (s.engine.dp_rank is None) == (engine.dp_rank is None)]
        # A whole server and its ranks exclude each other.
        own[base_url] = [*alike, DiscoveredEngine(engine)]
        self._admit()
        return back or not same

    def remove(self, base_url: str, by: str) -> bool:
        """Remove a server. Returns False if there is none."""
        if base_url not in self._admitted:
            return False
        identity = self._identity(base_url)
        self._by_source.get(ADMIN, {}).pop(base_url, None)
        if self.sources(base_url):
            self.removed[base_url] = Override(by, identity)
        self._admit()
        return True

    def drain(self, name: str, by: str) -> None:
        """Stop new requests to an engine id, or to all engines of a base URL."""
        self.drained[name] = Override(by, self._identity(_server(name)))

    def undrain(self, name: str) -> bool:
        """End ``drain``; False if it was not drained."""
        return self.drained.pop(name, None) is not None

    def decisions(self) -> AdminDecisions:
        """Return the current decisions, for another router of the same fleet."""
        added = [one.engine for found in self._by_source.get(ADMIN, {}).values() for one in found]
        return AdminDecisions(tuple(added), dict(self.removed), dict(self.drained))

    def adopt(self, decisions: AdminDecisions) -> None:
        """Replace the decisions by those of another router of the same fleet."""
        self.removed, self.drained = dict(decisions.removed), dict(decisions.drained)
        self.set_source(ADMIN, [DiscoveredEngine(engine) for engine in decisions.added])

    # -- the outcome --------------------------------------------------------------------------------------

    def wanted(self) -> DesiredFleet:
        """Return the desired fleet."""
        engines: list[EngineAddress] = []
        holds: dict[str, str] = {}
        identities: dict[str, str] = {}
        for base_url in self._admitted:
            engines += self._engines(base_url)
            if identity := self._identity(base_url):
                identities[base_url] = identity
            for one in self._discovered(base_url):
                if one.held:
                    holds.setdefault(one.engine.engine_id, one.held)
        for name, decision in self.drained.items():
            holds[name] = f"drained by {decision.by}"
        return DesiredFleet(tuple(engines), holds, identities)

    def _engines(self, base_url: str) -> list[EngineAddress]:
        first = self._by_source[self.sources(base_url)[0]][base_url]
        return list({one.engine.engine_id: one.engine for one in first}.values())

    def _discovered(self, base_url: str) -> Iterator[DiscoveredEngine]:
        for source in self.sources(base_url):
            yield from self._by_source[source][base_url]

    def _identity(self, base_url: str) -> str:
        return next((one.identity for one in self._discovered(base_url) if one.identity), "")

    def _admit(self) -> None:
        """Admit servers: those that were in and are still named, then others while there is room."""
        named = {base_url: None for source in ORDER for base_url in self._by_source.get(source, {})}
        self._review(self.removed, named)
        in_order = [*(url for url in self._admitted if url in named), *named]
        candidates = dict.fromkeys(url for url in in_order if url not in self.removed)
        self.left_out = max(0, len(candidates) - self.engines_max)
        self._admitted = dict.fromkeys(list(candidates)[: self.engines_max])
        self._review(self.drained, self._admitted)

    def _review(self, decisions: dict[str, Override], servers: Container[str]) -> None:
        """Drop decisions about servers that are gone or were replaced."""
        for name, decision in list(decisions.items()):
            now = self._identity(_server(name))
            if _server(name) not in servers or (now and decision.identity not in {"", now}):
                del decisions[name]
            elif now:
                decisions[name] = Override(decision.by, now)


def _server(name: str) -> str:
    """Return the base URL in an engine id."""
    return name.partition("#")[0]
