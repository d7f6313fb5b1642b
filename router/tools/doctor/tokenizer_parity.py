"""Tokenizer parity: whether prompts become the same tokens here and at the engine, for a few chats and
completions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.parity import PROBES, first_difference, probe_path
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.tools.doctor.evidence import PromptParity
from kvatlas.router.tools.doctor.http import Http, HttpAnswer


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def inbound(model: str, body: dict[str, Any]) -> InboundRequest:
    """Build the request as the router would receive it."""
    encoded = msgspec.json.encode({"model": model, **body})
    return InboundRequest("POST", probe_path(body), b"", [], encoded, model)


async def compare(
    reader: PromptReader, http: Http, base_url: str, model: str, frontend: Frontend
) -> list[PromptParity]:
    """Compare every probe prompt on one engine; stops if the engine has no tokenize endpoint."""
    results: list[PromptParity] = []
    for name, body in PROBES.items():
        result = await _compare_one(reader, http, base_url, name, {"model": model, **body}, frontend)
        results.append(result)
        if result.engine_problem.startswith(_ABSENT):
            break
    return results


_ABSENT = "no endpoint"


async def _compare_one(
    reader: PromptReader, http: Http, base_url: str, name: str, body: dict[str, Any], frontend: Frontend
) -> PromptParity:
    local, local_problem = await _local(reader, body, frontend)
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


async def _local(
    reader: PromptReader, body: dict[str, Any], frontend: Frontend
) -> tuple[list[int] | None, str]:
    try:
        read = await reader.read(inbound(str(body["model"]), body), (frontend,))
    except ApiError as problem:
        return None, f"refused: {problem}"
    if not isinstance(read, Prompt):
        return None, read.reason
    return list(read.token_ids), ""


def _theirs(answer: HttpAnswer) -> tuple[list[int] | None, str]:
    if answer.status in {404, 405, 501}:
        return None, f"{_ABSENT} ({answer.description})"
    if not answer.ok:
        return None, answer.description
    tokenized = answer.json(_Tokenized)
    return (None, "a response without tokens") if tokenized is None else (tokenized.tokens, "")
