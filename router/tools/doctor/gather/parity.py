"""Whether prompts become the same tokens here and at the engine: a few chats and completions, both ways."""

from __future__ import annotations

from typing import Any

import msgspec

from router.openai.errors import ApiError
from router.openai.request import InboundRequest
from router.prompts.origin.probes import PROBES, first_difference, probe_path
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.tools.doctor.evidence import PromptParity
from router.tools.doctor.gather.http import Http, HttpAnswer


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def inbound(model: str, body: dict[str, Any]) -> InboundRequest:
    """The request as the router would receive it."""
    encoded = msgspec.json.encode({"model": model, **body})
    return InboundRequest("POST", probe_path(body), b"", [], encoded, model)


async def compare(reader: PromptReader, http: Http, base_url: str, model: str) -> list[PromptParity]:
    """Every probe on one engine; stops asking an engine whose endpoint is absent."""
    results: list[PromptParity] = []
    for name, body in PROBES.items():
        result = await _compare_one(reader, http, base_url, name, {"model": model, **body})
        results.append(result)
        if result.engine_problem.startswith(_ABSENT):
            break
    return results


_ABSENT = "no endpoint"


async def _compare_one(
    reader: PromptReader, http: Http, base_url: str, name: str, body: dict[str, Any]
) -> PromptParity:
    local, local_problem = await _local(reader, body)
    answer = await http.post(f"{base_url}/tokenize", body)
    theirs, engine_problem = _theirs(answer)
    if local is None or theirs is None:
        return PromptParity(
            name,
            None if local is None else len(local),
            None if theirs is None else len(theirs),
            None,
            local_problem,
            engine_problem,
        )
    return PromptParity(name, len(local), len(theirs), first_difference(local, theirs))


async def _local(reader: PromptReader, body: dict[str, Any]) -> tuple[list[int] | None, str]:
    try:
        read = await reader.read(inbound(str(body["model"]), body))
    except ApiError as problem:
        return None, f"refused: {problem}"
    if not isinstance(read, Prompt):
        return None, read.reason
    return list(read.token_ids), ""


def _theirs(answer: HttpAnswer) -> tuple[list[int] | None, str]:
    if answer.status in {404, 405, 501}:
        return None, f"{_ABSENT} ({answer.what})"
    if not answer.ok:
        return None, answer.what
    tokenized = answer.json(_Tokenized)
    return (None, "an answer without tokens") if tokenized is None else (tokenized.tokens, "")
