"""The fields of Kubernetes objects that are used here; all others are dropped.

Unknown and missing fields are normal: API servers of other versions send more or fewer.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from lightkube.core.resource import ApiInfo, NamespacedResourceG, ResourceDef

Object = TypeVar("Object")
_ABSENT = msgspec.Raw(b"null")
_VERBS = ["list", "watch", "global_list", "global_watch"]


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
    """Conditions of an endpoint.

    None means unknown, which consumers must treat as ready according to the API.
    """

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


class LabelSelector(_Lenient, frozen=True):
    match_labels: dict[str, str] = {}


class TargetPort(_Lenient, frozen=True):
    number: int


class PoolSpec(_Lenient, frozen=True):
    selector: LabelSelector = LabelSelector()
    target_ports: list[TargetPort] = []


class InferencePool(_Lenient, frozen=True):
    """``inference.networking.k8s.io/v1`` InferencePool."""

    metadata: Meta
    spec: PoolSpec = PoolSpec()


class _ReceivedMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    resourceVersion: str = ""  # noqa: N815  # by lightkube's name for it
    name: msgspec.Raw = _ABSENT
    namespace: msgspec.Raw = _ABSENT
    uid: msgspec.Raw = _ABSENT
    deletionTimestamp: msgspec.Raw = _ABSENT  # noqa: N815
    annotations: msgspec.Raw = _ABSENT
    labels: msgspec.Raw = _ABSENT


class Received(NamespacedResourceG, msgspec.Struct, frozen=True, omit_defaults=True):
    """An object as passed on by lightkube."""

    # Only its version is decoded there; the rest stays text, so that an invalid object affects only itself,
    # and unwanted objects are not decoded.
    metadata: _ReceivedMeta = _ReceivedMeta()

    def read_as(self, kind: type[Object]) -> Object:
        """Decode as ``kind``. Raises ``msgspec.MsgspecError``, ``UnicodeDecodeError`` or
        ``RecursionError``.
        """
        return msgspec.json.decode(msgspec.json.encode(self), type=kind)


class ReceivedPod(Received, frozen=True, omit_defaults=True):
    """``v1`` Pod."""

    _api_info = ApiInfo(ResourceDef("", "v1", "Pod"), "pods", [*_VERBS, "patch"])
    spec: msgspec.Raw = _ABSENT
    status: msgspec.Raw = _ABSENT


class ReceivedSlice(Received, frozen=True, omit_defaults=True):
    """``discovery.k8s.io/v1`` EndpointSlice."""

    _api_info = ApiInfo(ResourceDef("discovery.k8s.io", "v1", "EndpointSlice"), "endpointslices", _VERBS)
    addressType: msgspec.Raw = _ABSENT  # noqa: N815
    endpoints: msgspec.Raw = _ABSENT
    ports: msgspec.Raw = _ABSENT


class ReceivedPool(Received, frozen=True, omit_defaults=True):
    """``inference.networking.k8s.io/v1`` InferencePool."""

    _api_info = ApiInfo(
        ResourceDef("inference.networking.k8s.io", "v1", "InferencePool"), "inferencepools", _VERBS
    )
    spec: msgspec.Raw = _ABSENT
