"""JSON schemas of the custom resources that the chart makes: the fields it uses, as operators define them.

Sources of the field names and types: the Prometheus operator's monitoring.coreos.com/v1 API and the Gateway
API's gateway.networking.k8s.io/v1. Unknown fields are refused, so a misspelt one does not pass.
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
_BACKEND = _object(("name",), name=_TEXT, port={"type": "integer", "minimum": 1, "maximum": 65535})
_PATH = _object(("type", "value"), type={"enum": ["Exact", "PathPrefix"]}, value=_TEXT)
_MATCH = _object((), path=_PATH)

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
}
