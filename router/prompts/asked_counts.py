"""Numbers that a request asks for: tokens of an answer, answers, prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvatlas.router.openai.numbers import lax_whole
from kvatlas.router.prompts.bodies import Parsed
from kvatlas.router.prompts.request import (
    BatchBody,
    ChatFields,
    CompletionBody,
    GenerateBody,
)

# Bounds of numbers that clients send: JSON allows thousands of digits. No engine has a longer context.
TOKENS_MAX: Final = 1 << 31
# vLLM refuses more (``VLLM_MAX_N_SEQUENCES``, 0.32).
ANSWERS_MAX: Final = 1 << 14
# Between two texts of a list, as clients write them.
_NEXT_TEXT: Final = re.compile(rb'",[ \n]{0,16}"')
_NEAR_BYTES: Final = 4096
# Quotes within texts are escaped.
_ANSWERS: Final = re.compile(rb'"n"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}("[^"\\]{1,64}"|[0-9.eE+-]{1,64})')


def answer_tokens(parsed: Parsed) -> tuple[int, int]:
    """Return the shortest answer that a request takes (``min_tokens``), at least 1, and the limit that it
    sets to its answer, 0 if it sets none; in tokens."""
    limits: Iterable[Any]
    if isinstance(parsed, ChatFields):
        least, limits = parsed.min_tokens, (parsed.max_completion_tokens, parsed.max_tokens)
    else:
        given = _given(parsed)
        least, limits = (
            given("min_tokens"),
            map(given, ("max_completion_tokens", "max_tokens", "max_output_tokens")),
        )
    least = least if type(least) is int and least > 1 else 1
    least = least if least < TOKENS_MAX else TOKENS_MAX  # noqa: FURB136
    for limit in limits:
        if type(limit) is int and limit > 0:
            return least, limit if limit < TOKENS_MAX else TOKENS_MAX  # noqa: FURB136
    return least, 0


def num_answers(parsed: Parsed) -> int:
    """Return how many answers a request wants to its prompt (``n``), at most ``ANSWERS_MAX``."""
    given = parsed.n if isinstance(parsed, ChatFields) else _given(parsed)("n")
    count = None if given is None else lax_whole(given)
    return 1 if count is None else max(1, min(count, ANSWERS_MAX))


def answers_beside(body: bytes) -> int:
    """Return the number of answers (``n``) of a body that is not decoded, by its beginning and its end:
    messages or prompt are what is long in it."""
    most = 1
    for part in (body[:_NEAR_BYTES], body[-_NEAR_BYTES:]):
        # The highest one: of equal keys engines take the last.
        for found in _ANSWERS.findall(part):
            with suppress(msgspec.MsgspecError):
                most = max(most, lax_whole(msgspec.json.decode(found)) or 1)
    return min(most, ANSWERS_MAX)


def num_prompts(parsed: Parsed) -> int:
    """Return about how many prompts a request has, without reading them."""
    if isinstance(parsed, BatchBody):
        return max(1, len(parsed.messages))
    if isinstance(parsed, CompletionBody):
        raw = bytes(parsed.prompt)
        # Quotes within texts are escaped.
        return 1 + len(_NEXT_TEXT.findall(raw)) if raw.startswith(b"[") else 1
    return 1


def _given(parsed: Parsed) -> Callable[[str], Any]:
    """Return the reader of the fields that limit the answer; None for those not given."""
    params = parsed.sampling_params if isinstance(parsed, GenerateBody) else None
    return params.get if isinstance(params, dict) else lambda name: getattr(parsed, name, None)
