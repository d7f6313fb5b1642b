"""The OpenAPI document of the ops port, against what the port answers."""

from __future__ import annotations

from typing import Any

from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.placement.hot_prefixes import EVERY
from tests.support.whole_router import MODEL, configure, routing, running

DOCUMENT = "/kvatlas/openapi.json"
CHAT = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello " * 600}]}
MAY_BE_EMPTY = {"/kvatlas/requests", "/kvatlas/problems"}
KINDS: dict[str | None, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def faults(document: Any, schema: Any, value: Any, at: str) -> list[str]:
    """Where ``value`` is not what ``schema`` says: missing or unknown fields, wrong types."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        tried = [faults(document, one, value, at) for one in schema["anyOf"]]
        return min(tried, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: {value!r} is none of {schema['enum']}"]
    wanted = KINDS.get(schema.get("type"), object)
    if not isinstance(value, wanted):
        return [f"{at}: {value!r} is no {schema['type']}"]
    found = []
    if "properties" in schema:
        if set(value) != set(schema["properties"]):
            found.append(f"{at}: fields {set(value) ^ set(schema['properties'])}")
        for name, one in schema["properties"].items():
            found += faults(document, one, value.get(name), f"{at}.{name}")
    elif isinstance(schema.get("additionalProperties"), dict):
        for name, one in value.items():
            found += faults(document, schema["additionalProperties"], one, f"{at}[{name}]")
    elif "items" in schema:
        for one in value:
            found += faults(document, schema["items"], one, f"{at}[]")
    return found


async def test_every_answer_is_what_the_document_says() -> None:
    pool = StoreSettings(name="pool", kind="mooncake", events=("tcp://127.0.0.1:1",), model=MODEL)
    async with running({}) as engines, routing(configure(*engines, stores=(pool,))) as rig:
        for _ in range(2 * EVERY):  # enough that the sampled prefixes have some too
            await rig.ok("POST", "/v1/chat/completions", CHAT, {"x-session-id": "s"})
        status, document = await rig.ask("GET", DOCUMENT)
        assert (status, document["info"]["title"]) == (200, "kvatlas")
        assert {method for path in document["paths"].values() for method in path} == {"get", "post"}
        paths = set(document["paths"])
        assert {"/health", "/ready", "/v1/models", "/kvatlas/engines", "/kvatlas/receipts"} <= paths
        for path in sorted(paths - {"/metrics", "/kvatlas/usage", "/kvatlas/explain"}):
            status, answer = await rig.ask("GET", path.replace("{model}", MODEL))
            assert status == 200, path
            answers = document["paths"][path]["get"]["responses"]
            schema = answers["200"]["content"]["application/json"]["schema"]
            assert not faults(document, schema, answer, path)
            assert answer or path in MAY_BE_EMPTY, path
        refused = document["paths"]["/v1/models"]["get"]["responses"]["default"]
        status, answer = await rig.ask("GET", "/v1/models/unknown")
        assert status == 404
        schema = refused["content"]["application/json"]["schema"]
        assert not faults(document, schema, answer, "error")
