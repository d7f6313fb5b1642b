"""Engines of the fleet: their addresses, what a source of them is, and the desired set.

An engine is a (base URL, data-parallel rank), with the addresses of its events. The desired set merges the
sets of all sources with an administrator's decisions. Pure bookkeeping. Rules, in this order:

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

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal, NewType, Protocol
from urllib.parse import urlsplit

import msgspec

Role = Literal["prefill", "decode", "both"]
EngineKind = Literal["vllm", "sglang"]
# Names an engine in metrics, receipts, headers and leases. Made only by ``EngineAddress.engine_id`` and
# never parsed: use the engine's address instead.
EngineId = NewType("EngineId", str)


class EngineAddress(msgspec.Struct, frozen=True):
    """Identity and addresses of an engine; leave out ``events`` for an engine that publishes none."""

    base_url: str
    """``http://host:port`` or ``https://host:port``, without ``/v1``. One per server, or per data-parallel
    rank."""
    dp_rank: int | None = None
    """Data-parallel rank of this entry, sent to the server as ``x-data-parallel-rank``; not set without data
    parallelism. Set it for each rank of a server with several."""
    events: str | None = None
    """ZMQ address its events are published at, e.g. ``tcp://host:5557``. Set it for vLLM before 0.31, which
    is not asked for it, and where a proxy or a port map changes the address."""
    replay: str | None = None
    """ZMQ address that sends missed events again, e.g. ``tcp://host:5558``. Set it with `events`: without it,
    lost events leave the feed degraded."""
    topic: str = ""
    """ZMQ prefix to subscribe to, the ``topic`` of the engine's ``--kv-events-config``; "" subscribes to
    every topic. Set it if several engines publish on one address."""
    snapshot: str | None = None
    """ZMQ address that serves snapshots, if the engine has a separate one; otherwise ``replay`` is asked. Set
    it for publishers with a separate port."""
    role: Literal["prefill", "decode", "both"] | None = None
    """``prefill``: computes prompts for others; ``decode``: fetches what those computed, and answers;
    ``both``: either. Not set: an engine for itself ([prefill-decode.md](prefill-decode.md))."""
    kind: Literal["vllm", "sglang"] | None = None
    """The engine's software. Not set: found from its `/v1/models` and `/server_info`
    ([engines.md](engines.md)). Set it if a proxy in front of the engine hides these."""
    kv_source: str | None = None
    """``HOST:PORT`` at which other engines fetch blocks from its host memory: the `p2p` tier of vLLM's
    OffloadingConnector, of rank 0 if there are several. Not set: the host of ``base_url`` and
    `pd.offloading_port` ([pull.md](pull.md)). Set it if the tier listens elsewhere."""

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for other engines."""
        return self.role in {"prefill", "both"}

    @property
    def answers(self) -> bool:
        """Whether it generates responses for clients."""
        return self.role != "prefill"

    @property
    def decodes(self) -> bool:
        """Whether it fetches prompts computed by other engines."""
        return self.role in {"decode", "both"}

    @property
    def engine_id(self) -> EngineId:
        """Stable name in metrics, receipts and headers: ``http://host:port`` or ``...#dp1``."""
        return EngineId(self.base_url if self.dp_rank is None else f"{self.base_url}#dp{self.dp_rank}")


@lru_cache(maxsize=4096)
def endpoint_of(base_url: str) -> str:
    """Return ``host:port`` of a base URL, IPv6 addresses in brackets, as gateways name it."""
    url = urlsplit(base_url)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


NOT_READY = "not ready"
"""Of ``DiscoveredEngine.held``: its own state, where all others are somebody's will."""


class DiscoveredEngine(msgspec.Struct, frozen=True):
    """One engine as a source sees it now."""

    engine: EngineAddress
    held: str = ""
    """Why it must get no new requests; "" if it may get them."""
    identity: str = ""
    """Identity of the process at that address, e.g. a pod's uid. If it changes, all known state is
    dropped."""
    ends_s: float | None = None
    """Unix time at which its process ends, if that is known."""


PROBLEM_LENGTH_MAX = 300


class CannotStartError(Exception):
    """A source lacks what it needs; the message names the key or file, and the remedy."""


class SourceStats(msgspec.Struct):
    """State of a source, shown by metrics, ``/kvatlas/sources`` and the doctor."""

    synced: Annotated[bool, "kvatlas_source_synced"] = False
    """1 once its complete list was read."""
    engines: Annotated[int, "kvatlas_source_engines"] = 0
    """Number of engines in its current set."""
    updates: Annotated[int, "kvatlas_source_updates_total"] = 0
    """Number of times its set changed."""
    failing: Annotated[bool, "kvatlas_source_failing"] = False
    """1 while its list may be out of date."""
    errors: Annotated[dict[str, int], "kvatlas_source_errors_total{reason}"] = {}
    """Failures, by reason."""
    refused: Annotated[int, "kvatlas_source_refused_total"] = 0
    """Entries ignored because they were invalid."""
    last_error: str = ""
    deletion_costs_written: Annotated[int, "kvatlas_source_deletion_costs_written_total"] = 0
    """Deletion costs written to pods (`fleet.kubernetes.deletion_costs`)."""

    def failed(self, reason: str, text: str) -> bool:
        """Count a failure. Returns whether it is new and worth a log line."""
        news = not self.failing or self.last_error != text
        self.failing = True
        self.complain(reason, text)
        return news

    def complain(self, reason: str, text: str) -> None:
        """Count a failure that does not affect the rest of the set."""
        self.errors[reason] = self.errors.get(reason, 0) + 1
        self.last_error = text[:PROBLEM_LENGTH_MAX]

    def recovered(self) -> None:
        """Record that it works (again); the last error is kept."""
        self.failing = False


Publish = Callable[[Sequence[DiscoveredEngine]], None]
Costs = Callable[[], Mapping[str, int]]
"""Deletion costs by base URL; empty: none are to be written now."""


class Source(Protocol):
    """Runs until cancelled. ``publish`` gets the complete set whenever it may have changed."""

    name: str
    stats: SourceStats

    async def run(self, publish: Publish) -> None: ...


ADMIN, STATIC = "admin", "static"
ORDER = (ADMIN, STATIC, "file", "kubernetes", "dns")


class DesiredFleet(msgspec.Struct, frozen=True):
    """The desired fleet. ``holds``: engine id or base URL -> why it gets no new requests; ``ends_s``: the
    same -> Unix time by which its streams must have ended; ``identities``: base URL -> who is there."""

    engines: tuple[EngineAddress, ...] = ()
    holds: dict[str, str] = {}
    identities: dict[str, str] = {}
    ends_s: dict[str, float] = {}


class Override(msgspec.Struct, frozen=True):
    """Decision of an administrator about a server: the administrator, and the server's identity at that
    time.
    """

    by: str
    identity: str = ""
    ends_s: float | None = None
    """Of a drain: Unix time by which its streams must have ended."""


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

    def drain(self, name: str, by: str, ends_s: float | None = None) -> None:
        """Stop new requests to an engine id, or to all engines of a base URL. ``ends_s``: Unix time by which
        its streams must have ended."""
        self.drained[name] = Override(by, self._identity(_server(name)), ends_s)

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
        engines: list[EngineAddress] = []
        holds: dict[str, str] = {}
        identities: dict[str, str] = {}
        ends_s: dict[str, float] = {}
        for base_url in self._admitted:
            engines += self._engines(base_url)
            if identity := self._identity(base_url):
                identities[base_url] = identity
            for one in self._discovered(base_url):
                if one.held:
                    holds.setdefault(one.engine.engine_id, one.held)
                    if one.ends_s is not None:
                        ends_s.setdefault(one.engine.engine_id, one.ends_s)
        for name, decision in self.drained.items():
            holds[name] = f"drained by {decision.by}"
            if decision.ends_s is not None:
                ends_s[name] = min(decision.ends_s, ends_s.get(name, decision.ends_s))
        return DesiredFleet(tuple(engines), holds, identities, ends_s)

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
                decisions[name] = msgspec.structs.replace(decision, identity=now)


def _server(name: str) -> str:
    """Return the base URL in an engine id."""
    return name.partition("#")[0]
