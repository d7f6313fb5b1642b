"""JSON schemas of the custom resources that the chart makes: the fields it uses, as operators define them.

Sources of the field names and types: the Prometheus operator's monitoring.coreos.com/v1 API, the Gateway
API's gateway.networking.k8s.io/v1 and its Inference Extension's inference.networking.k8s.io/v1, and the APIs
of Istio and GKE. Unknown fields are refused, so a misspelt one does not pass.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Schema = {"type": "string", "pattern": "^(0|([0-9]+(ms|[smhdwy]))+)$"}
_LABELS = _object(matchLabels=_TEXTS)
_SECRET_KEY = _object(("key",), name=_TEXT, key=_TEXT)
_ENDPOINT = _object(
    port=_TEXT,
    path=_TEXT,
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    authorization=_object(type=_TEXT, credentials=_SECRET_KEY),
)
_RULE = _object(
    ("alert", "expr"), alert=_TEXT, expr=_TEXT, **{"for": _DURATION}, labels=_TEXTS, annotations=_TEXTS
)
_PARENT = _object(("name",), name=_TEXT, namespace=_TEXT, sectionName=_TEXT, port={"type": "integer"})
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_BACKEND = _object(("name",), group={"type": "string"}, kind=_TEXT, name=_TEXT, port=_PORT)
_PATH = _object(("type", "value"), type={"enum": ["Exact", "PathPrefix"]}, value=_TEXT)
_MATCH = _object((), path=_PATH)
_NUMBER = _object(("number",), number=_PORT)
_PICKER = _object(
    ("name", "port"),  # a port is needed for kind Service
    group={"const": ""},
    kind={"const": "Service"},
    name=_TEXT,
    port=_NUMBER,
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
_POOL_REF = _object(
    ("group", "kind", "name"),
    group={"const": "inference.networking.k8s.io"},
    kind={"const": "InferencePool"},
    name=_TEXT,
)
_HEALTH = _object(
    ("type",), type={"const": "HTTP"}, httpHealthCheck=_object((), requestPath=_TEXT, port=_PORT)
)

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        ("selector", "endpoints"), selector=_LABELS, endpoints=_list(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        ("selector", "podMetricsEndpoints"), selector=_LABELS, podMetricsEndpoints=_list(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        ("groups",), groups=_list(_object(("name", "rules"), name=_TEXT, rules=_list(_RULE)))
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        ("parentRefs",),
        parentRefs=_list(_PARENT),
        hostnames=_list(_TEXT),
        rules=_list(_object(matches=_list(_MATCH), backendRefs=_list(_BACKEND))),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        ("selector", "targetPorts"),
        selector=_object(("matchLabels",), matchLabels={**_TEXTS, "minProperties": 1, "maxProperties": 64}),
        targetPorts={**_list(_NUMBER), "maxItems": 8, "uniqueItems": True},
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=_PICKER,
    ),
    ("networking.istio.io/v1", "DestinationRule"): _object(
        ("host",),
        host=_TEXT,
        trafficPolicy=_object(
            (), tls=_object(("mode",), mode={"enum": ["SIMPLE"]}, insecureSkipVerify={"type": "boolean"})
        ),
    ),
    ("networking.gke.io/v1", "HealthCheckPolicy"): _object(
        ("targetRef", "default"), targetRef=_POOL_REF, default=_object((), config=_HEALTH)
    ),
    ("networking.gke.io/v1", "GCPBackendPolicy"): _object(
        ("targetRef", "default"), targetRef=_POOL_REF, default=_object((), timeoutSec={"type": "integer"})
    ),
}
