"""The parts of Kubernetes objects that matter here, as the API server writes them; all else is skipped.

Unknown fields and missing ones are normal: servers of other versions say more or less.
"""

from __future__ import annotations

import msgspec


class _Lenient(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Meta(_Lenient, frozen=True):
    """An object's metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class ContainerPort(_Lenient, frozen=True):
    container_port: int
    name: str = ""
    protocol: str = "TCP"


class Container(_Lenient, frozen=True):
    ports: list[ContainerPort] | None = None


class PodSpec(_Lenient, frozen=True):
    containers: list[Container] = []


class Condition(_Lenient, frozen=True):
    type: str
    status: str


class PodStatus(_Lenient, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[Condition] | None = None


class Pod(_Lenient, frozen=True):
    """``v1`` Pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class TargetRef(_Lenient, frozen=True):
    kind: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class EndpointConditions(_Lenient, frozen=True):
    """None is "not said": ready then, as the API asks consumers to take it."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(_Lenient, frozen=True):
    addresses: list[str] = []
    conditions: EndpointConditions = EndpointConditions()
    target_ref: TargetRef | None = None


class EndpointPort(_Lenient, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str = "TCP"


class EndpointSlice(_Lenient, frozen=True):
    """``discovery.k8s.io/v1`` EndpointSlice."""

    metadata: Meta
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class ListMeta(_Lenient, frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(_Lenient, frozen=True):
    """One page of a list; items stay raw, so that one that is not understood costs only itself."""

    metadata: ListMeta = ListMeta()
    items: list[msgspec.Raw] | None = None


class WatchEvent(_Lenient, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Status(_Lenient, frozen=True):
    """What the API server answers instead of an object."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Versioned(_Lenient, frozen=True):
    """Any object, for its version."""

    metadata: ListMeta = ListMeta()
