"""Prompts whose tokens are compared, here and at an engine, before a tokenizer is used, and by ``doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.bodies import decode_body
from kvatlas.router.prompts.hub import TokenizerProblem
from kvatlas.router.prompts.local_model import LocalModel
from kvatlas.router.prompts.remote import EngineSide
from kvatlas.router.prompts.request import (
    ChatBody,
    CompletionBody,
    NotLocalError,
    decode_prompt,
    first_prompt,
)

_ODD: Final = "naïve café 你好 🙂 x==1\n\n\tdef f(): return '<&>'  3.14159 ..."


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# Request bodies without ``model``.
PROBES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"messages": [_user("Hello, how are you?")]},
    "chat with system": {
        "messages": [{"role": "system", "content": " Be brief. "}, _user(_ODD)],
    },
    "chat of three turns": {
        "messages": [
            _user("What is 2 + 2?"),
            {"role": "assistant", "content": "It is 4. "},
            _user("And\nthat doubled?"),
        ]
    },
    "completion": {"prompt": "Once upon a time there was"},
    "completion, odd text": {"prompt": f"  {_ODD}\n"},
}
_SCOPE: Final = b"\0probe"
_ENCODER: Final = msgspec.json.Encoder()


def probe_path(body: dict[str, Any]) -> str:
    """Path to which a probe would be sent."""
    return CHAT if "messages" in body else COMPLETION


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or the length of the shorter one; None if equal."""
    if len(ours) == len(theirs) and list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


async def compare(local: LocalModel, side: EngineSide, base_url: str, model: str) -> int:
    """Return the number of probes for which an engine gives the same tokens. Raises ``TokenizerProblem`` for
    the first that differs."""

    async def one(name: str, given: dict[str, Any]) -> bool:
        path, body = probe_path(given), _ENCODER.encode({"model": model, **given})
        ours = await _tokens(local, path, body)
        return ours is not None and await compare_one(local, side, base_url, path, body, ours, name)

    return sum(await asyncio.gather(*(one(name, body) for name, body in PROBES.items())))


async def compare_one(
    local: LocalModel, side: EngineSide, base_url: str, path: str, body: bytes, ours: Sequence[int], name: str
) -> bool:
    """Whether the engine gives the same tokens; False if it does not report them. Raises
    ``TokenizerProblem``."""
    parsed = decode_body(path, body)
    # /tokenize uses the template, while the engine's chats are rendered by code (gpt-oss).
    told = not (isinstance(parsed, ChatBody) and local.renderer.name == "harmony")
    known = parsed if told and isinstance(parsed, ChatBody | CompletionBody) else None
    theirs = await side.tokens(base_url, path, body, known)
    if theirs is None or theirs.multimodal:
        return False
    at = first_difference(ours, theirs.ids)
    if at is None:
        return True
    raise TokenizerProblem(
        "differs",
        f"{base_url} makes other tokens of the {name}: {len(theirs.ids)}, here {len(ours)}, the first "
        f"difference at token {at}",
        "kvatlas doctor shows it; give --tokenizer and models.NAME.chat_template as the engines were started",
    )


async def _tokens(local: LocalModel, path: str, body: bytes) -> Sequence[int] | None:
    """The tokens made here; None if a prompt of this kind is left to engines."""
    try:
        parsed = decode_body(path, body)
        if isinstance(parsed, ChatBody):
            return (await local.chat(parsed, NO_EXTRAS, _SCOPE, long=False)).ids
        if isinstance(parsed, CompletionBody):
            prompt, _ = first_prompt(decode_prompt(parsed.prompt))
            return (await local.completion(parsed, prompt, NO_EXTRAS, _SCOPE)).ids
    except (NotLocalError, ApiError):
        pass
    return None
