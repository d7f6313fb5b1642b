"""Kubernetes objects with everything a real API server writes, so that what is not asked for is there too."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
LABELS = {"app": "vllm"}
SERVICE = "vllm"
SERVICE_LABEL = "kubernetes.io/service-name"


def pod(
    name: str,
    ip: str = "",
    *,
    namespace: str = "serving",
    uid: str = "",
    ready: bool = True,
    phase: str = "Running",
    terminating: bool = False,
    ports: dict[str, int] | None = None,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
) -> Json:
    """A pod of a Deployment as its API server shows it (without a resourceVersion)."""
    named = {"http": 8000} if ports is None else ports
    metadata: Json = {
        "name": name,
        "generateName": "vllm-7c9d8f6b5-",
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "creationTimestamp": "2026-11-21T08:14:02Z",
        "labels": {**(LABELS if labels is None else labels), "pod-template-hash": "7c9d8f6b5"},
        "annotations": {"kubectl.kubernetes.io/restartedAt": "2026-11-21T08:00:00Z", **(annotations or {})},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-7c9d8f6b5", "controller": True}
        ],
        "managedFields": [
            {
                "manager": "kubelet",
                "operation": "Update",
                "apiVersion": "v1",
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:status": {"f:conditions": {'k:{"type":"Ready"}': {".": {}}}}},
                "subresource": "status",
            }
        ],
    }
    if terminating:
        metadata |= {"deletionTimestamp": "2026-11-21T09:14:32Z", "deletionGracePeriodSeconds": 30}
    status: Json = {
        "phase": phase,
        "conditions": [
            {"type": "Initialized", "status": "True", "lastProbeTime": None},
            {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None},
        ],
        "hostIP": "10.1.0.4",
        "startTime": "2026-11-21T08:14:02Z",
        "qosClass": "Burstable",
    }
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm/vllm-openai:v0.32.0",
                    "ports": [
                        {"name": key, "containerPort": port, "protocol": "TCP"}
                        if key
                        else {"containerPort": port, "protocol": "TCP"}
                        for key, port in named.items()
                    ],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }
            ],
            "nodeName": "node-a",
            "terminationGracePeriodSeconds": 30,
        },
        "status": status,
    }


def endpoint(
    address: str, *, ready: bool | None = True, terminating: bool = False, of: Json | None = None
) -> Json:
    """One endpoint of a slice; ``of`` is its pod."""
    found: Json = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
        "nodeName": "node-a",
    }
    if of is not None:
        meta = of["metadata"]
        found["targetRef"] = {
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        }
    return found


def endpoint_slice(
    name: str,
    endpoints: list[Json] | None,
    *,
    namespace: str = "serving",
    ports: dict[str, int] | None = None,
    address_type: str = "IPv4",
) -> Json:
    """A slice of the engines' Service."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "labels": {SERVICE_LABEL: SERVICE, "endpointslice.kubernetes.io/managed-by": "controller"},
        },
        "addressType": address_type,
        "endpoints": endpoints,
        "ports": [
            {"name": key, "port": port, "protocol": "TCP"}
            for key, port in ({"http": 8000} if ports is None else ports).items()
        ],
    }


def inference_pool(
    name: str, selector: dict[str, str], ports: list[int], *, namespace: str = "serving"
) -> Json:
    """A pool with the status that its gateway writes."""
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    return {
        "kind": "InferencePool",
        "apiVersion": "inference.networking.k8s.io/v1",
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": {}},
        "spec": {
            "selector": {"matchLabels": selector},
            "targetPorts": [{"number": port} for port in ports],
            "appProtocol": "http",
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": "kvatlas-epp",
                "port": {"number": 9002},
                "failureMode": "FailClose",
            },
        },
        "status": {"parents": [{"parentRef": {"name": "gateway"}, "conditions": [accepted]}]},
    }
