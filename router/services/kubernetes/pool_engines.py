"""From pods, EndpointSlices and an InferencePool to engines. Pure: equal objects always give equal results.

If pods are selected, each running pod with an address is an engine; slices, if they are watched too, show
whether it is ready and complete its ports; an endpoint that is not a pod is an engine as well. With slices
alone every endpoint is an engine. An InferencePool selects pods, and each of its target ports is an engine
at every pod, since a gateway knows no others: several are the ranks of one server. Otherwise, an annotation
overrides a named port. Invalid values are ignored and reported as a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from kvatlas.router.fleet.engines import NOT_READY, DiscoveredEngine, EngineAddress, EngineKind, Role
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.services.kubernetes.objects import Endpoint, EndpointSlice, InferencePool, Pod

PREFIX = "kvatlas.io/"
_KINDS: dict[str, EngineKind] = {"vllm": "vllm", "sglang": "sglang"}
ROLE_LABEL = "llm-d.ai/role"
_ROLES: dict[str, Role] = {
    "prefill": "prefill",
    "decode": "decode",
    "prefill-decode": "both",
    "both": "both",
}
RANKS_MAX = 1024
TERMINATING, ANNOTATED = "terminating", "drained by annotation"
NO_SLICE = "in no EndpointSlice"
_OVER = frozenset({"Succeeded", "Failed"})


class ClusterView(NamedTuple):
    """Engines in a stable order, and the invalid values that were ignored."""

    discovered: list[DiscoveredEngine]
    problems: list[str]


class _Place(NamedTuple):
    """An endpoint as described by all slices together."""

    address: str
    held: str
    ports: dict[str, int]
    pod: tuple[str, str] | None
    uid: str


class _Server(NamedTuple):
    """Facts about one server before its ports are chosen."""

    where: str
    address: str
    ports: dict[str, int]
    annotations: dict[str, str]
    held: str
    uid: str
    role: str | None = None
    ends_s: float | None = None
    """Unix time at which its grace period is over."""


def read_cluster(
    pods: Iterable[Pod],
    slices: Iterable[EndpointSlice],
    settings: KubernetesSettings,
    target_ports: Sequence[int] = (),
) -> ClusterView:
    """Derive the engines; ``settings`` name the watched kinds of objects and the ports.
    ``target_ports``: of the pool."""
    places = _places(slices)
    by_pod: dict[tuple[str, str], _Place] = {p.pod: p for p in places if p.pod is not None}
    servers: list[_Server] = []
    if settings.selector or settings.inference_pool:
        gated = bool(settings.service_selector)
        servers += [server for pod in pods for server in _of_pod(pod, by_pod, gated=gated)]
        places = [place for place in places if place.pod is None]
    servers += [_Server(p.address, p.address, p.ports, {}, p.held, p.uid) for p in places]
    discovered: dict[str, DiscoveredEngine] = {}
    problems: list[str] = []
    for server in sorted(servers, key=_rank):
        for one in _engines(server, settings, target_ports, problems):
            discovered.setdefault(one.engine.engine_id, one)
    return ClusterView(sorted(discovered.values(), key=lambda one: one.engine.engine_id), problems)


# Read by the ReplicaSet controller: of pods that are alike otherwise, those with the lowest cost are deleted
# first; a pod without the annotation counts as 0 (Kubernetes 1.22 and later).
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_COST_MAX = (1 << 31) - 1
# 0.1 s of prefill per minute: less is noise of an idle engine.
_COST_STEP = 100
_COST_CHANGE = 0.25


def changed_costs(
    pods: Iterable[Pod], discovered: Iterable[DiscoveredEngine], costs: Mapping[str, int]
) -> Iterator[tuple[Pod, int]]:
    """Yield the pods whose deletion cost is to be written. ``costs``: by base URL; a pod with several servers
    has their sum. A cost is written if it changed by ``_COST_CHANGE`` of itself."""
    by_pod: dict[str, set[str]] = {}
    for one in discovered:
        by_pod.setdefault(one.identity, set()).add(one.engine.base_url)
    for pod in pods:
        known = [costs[url] for url in by_pod.get(pod.metadata.uid, ()) if url in costs]
        if not known or pod.metadata.deletion_timestamp is not None:
            continue
        cost = max(-1, min(_COST_MAX, sum(known)))
        try:
            before = int((pod.metadata.annotations or {}).get(DELETION_COST, "0"))
        except ValueError:
            before = 0
        step = max(_COST_STEP, _COST_CHANGE * max(abs(before), abs(cost)))
        if (before < 0) != (cost < 0) or abs(cost - before) >= step:
            yield pod, cost


class PoolView(NamedTuple):
    """The relevant content of an InferencePool: the pods' label selector, and their ports."""

    selector: str
    ports: tuple[int, ...]


def read_pool(pools: Iterable[InferencePool], name: str) -> PoolView | None:
    """Read a pool; None if it does not exist. Raises ``ValueError`` if it lacks required fields."""
    pool = next((one for one in pools if one.metadata.name == name), None)
    if pool is None:
        return None
    labels = pool.spec.selector.match_labels
    ports = tuple(port.number for port in pool.spec.target_ports)
    if not labels or not ports or not all(0 < port < 1 << 16 for port in ports):
        raise ValueError(f"InferencePool {name}: it needs selector.matchLabels and targetPorts")
    return PoolView(",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports)


def _of_pod(pod: Pod, by_pod: dict[tuple[str, str], _Place], *, gated: bool) -> Iterator[_Server]:
    meta, annotations = pod.metadata, pod.metadata.annotations or {}
    if not pod.status.pod_ip or pod.status.phase in _OVER or _yes(annotations, "ignore"):
        return
    place = by_pod.get((meta.namespace, meta.name))
    if place is not None and place.uid not in {"", meta.uid}:
        # The slice is about an earlier pod of this name.
        place = None
    ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
    held = ""
    if meta.deletion_timestamp is not None:
        held = TERMINATING
    elif not ready:
        held = NOT_READY
    elif _yes(annotations, "drain"):
        held = ANNOTATED
    elif gated:
        held = NO_SLICE if place is None else place.held
    ports: dict[str, int] = {} if place is None else dict(place.ports)
    listed = [port for c in pod.spec.containers for port in c.ports or () if port.protocol == "TCP"]
    ports |= {port.name: port.container_port for port in listed if port.name}
    if len(listed) == 1:
        ports.setdefault("", listed[0].container_port)
    where = f"{meta.namespace}/{meta.name}"
    role = (meta.labels or {}).get(ROLE_LABEL)
    ends_s = None if meta.deletion_timestamp is None else _unix_s(meta.deletion_timestamp)
    yield _Server(where, pod.status.pod_ip, ports, annotations, held, meta.uid, role, ends_s)


def _unix_s(text: str) -> float | None:
    """The deletion timestamp of a pod is the end of its grace period
    (apiserver, pkg/registry/rest/delete.go ``BeforeDelete``)."""
    try:
        return msgspec.convert(text, datetime).timestamp()
    except (msgspec.ValidationError, ValueError, OverflowError):
        return None


def _places(slices: Iterable[EndpointSlice]) -> list[_Place]:
    """Merge every endpoint once."""
    # While slices are rearranged an endpoint may be in two, and either may be outdated; a pod with two
    # addresses is in two, and counts by its IPv4 address.
    found: dict[str, _Place] = {}
    for one in sorted(slices, key=lambda s: (s.address_type, s.metadata.namespace, s.metadata.name)):
        if one.address_type == "FQDN":
            continue
        listed = [port for port in one.ports or () if port.port is not None and port.protocol == "TCP"]
        ports = {port.name or "": port.port for port in listed if port.port is not None}
        if len(listed) == 1 and listed[0].port is not None:
            ports[""] = listed[0].port
        for endpoint in one.endpoints or ():
            place = _place(endpoint, one.metadata.namespace, ports)
            if place is None:
                continue
            key = place.uid or place.address
            known = found.get(key)
            if known is None:
                found[key] = place
            else:
                held = known.held and place.held and min(known.held, place.held)
                found[key] = known._replace(held=held, ports=place.ports | known.ports)
    return list(found.values())


def _place(endpoint: Endpoint, namespace: str, ports: dict[str, int]) -> _Place | None:
    if not endpoint.addresses:
        return None
    told, held = endpoint.conditions, ""
    if told.terminating:
        held = TERMINATING
    elif told.ready is False:
        held = NOT_READY
    ref = endpoint.target_ref
    pod = (ref.namespace or namespace, ref.name) if ref is not None and ref.kind == "Pod" else None
    return _Place(endpoint.addresses[0], held, ports, pod, ref.uid if ref is not None else "")


def _rank(server: _Server) -> tuple[int, str, str]:
    """Rank two servers at one address: one that is not terminating wins, since addresses are reused."""
    return (2 if server.held == TERMINATING else int(bool(server.held)), server.where, server.uid)


def _engines(
    server: _Server, settings: KubernetesSettings, target_ports: Sequence[int], problems: list[str]
) -> Iterator[DiscoveredEngine]:
    def number(name: str, most: int) -> int | None:
        text = server.annotations.get(PREFIX + name)
        if text is None:
            return None
        if text.isascii() and text.isdecimal() and len(text) < 8 and 0 < int(text) <= most:
            return int(text)
        problems.append(f"{server.where}: annotation {PREFIX}{name} = {text[:40]!r} is not 1 to {most}")
        return None

    def port(annotation: str, name: str) -> int | None:
        return number(annotation, 65535) or server.ports.get(name)

    http = target_ports or [port("port", settings.port_name) or server.ports.get("") or settings.port]
    events = port("events-port", settings.events_port_name)
    replay = port("replay-port", settings.replay_port_name) if events else None
    snapshot = number("snapshot-port", 65535) if events else None
    source = number("kv-source-port", 65535)
    ranks = len(http) if len(http) > 1 else number("data-parallel-size", RANKS_MAX) or 1
    if max(events or 0, replay or 0, snapshot or 0, source or 0) + ranks - 1 > 65535:
        problems.append(f"{server.where}: ports of {ranks} ranks reach beyond 65535")
        events = replay = snapshot = source = None
    kind = server.annotations.get(f"{PREFIX}kind")
    if kind is not None and kind not in _KINDS:
        known = ", ".join(_KINDS)
        problems.append(f"{server.where}: annotation {PREFIX}kind = {kind[:40]!r} is none of {known}")
    held = server.held
    if server.role is not None and server.role not in _ROLES:
        held = held or f"its role {server.role[:40]!r} is unknown"
        problems.append(
            f"{server.where}: label {ROLE_LABEL} = {server.role[:40]!r} is none of {', '.join(_ROLES)}"
        )
    host = f"[{server.address}]" if ":" in server.address else server.address
    for rank in range(ranks):
        zmq = [None if base is None else f"tcp://{host}:{base + rank}" for base in (events, replay, snapshot)]
        engine = EngineAddress(
            f"http://{host}:{http[rank] if len(http) > 1 else http[0]}",
            rank if ranks > len(http) else None,
            zmq[0],
            zmq[1],
            server.annotations.get(f"{PREFIX}topic", ""),
            zmq[2],
            _ROLES.get(server.role or ""),
            kind=_KINDS.get(kind or ""),
            kv_source=None if source is None else f"{host}:{source}",
        )
        yield DiscoveredEngine(engine, held, server.uid, server.ends_s)


def _yes(annotations: dict[str, str], name: str) -> bool:
    return annotations.get(PREFIX + name, "").strip().lower() in {"true", "yes", "1"}
