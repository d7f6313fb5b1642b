"""Usage that an answer reports, in the shape of each API, whole or as one event of a stream.

``prompt_tokens`` (OpenAI), ``input_tokens`` (Responses; Anthropic counts there what was not cached), or
``tokens.input_tokens`` (Cohere); at the top, or in ``response``, ``message`` or ``delta`` of an event.
What transcriptions report are seconds of audio, embeddings of Cohere's API tokens in
``meta.billed_units``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec

from kvatlas.router.openai.request import Usage

# Positions of Whisper's encoder: 1500 for 30 s (vllm/model_executor/models/whisper.py of 0.32).
AUDIO_TOKENS_PER_S: Final = 50


# Reports beyond it are not believed: they would be charged, and are no 64 bits.
_TOKENS_MAX: Final = 1 << 40
_Count = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None
_Number = Annotated[float, msgspec.Meta(ge=0, le=_TOKENS_MAX)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count = None


class _Counts(msgspec.Struct, gc=False):
    input_tokens: _Number = 0
    output_tokens: _Number = 0


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None
    tokens: _Counts | None = None
    seconds: _Number | None = None
    cached_tokens: _Number | None = None


class _Part(msgspec.Struct, gc=False):
    """Member of an event that may carry the usage."""

    usage: _Usage | None = None


class _Meta(msgspec.Struct, gc=False):
    billed_units: _Counts | None = None


class _Answer(_Part, gc=False):
    meta: Any = None
    response: _Part | None = None
    message: Any = None
    delta: Any = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def read_usage(body: bytes) -> Usage | None:
    """The usage in a JSON answer or in one event's data; None where there is none (or null).

    Raises ``msgspec.MsgspecError`` where it is of no known shape.
    """
    answer = _DECODER.decode(body)
    usage = answer.usage
    if usage is None and answer.response is not None:
        usage = answer.response.usage
    if usage is None:
        for part in (answer.message, answer.delta):
            if usage is None and isinstance(part, dict):
                usage = msgspec.convert(part.get("usage"), _Usage | None)
    if usage is None:
        if not isinstance(answer.meta, dict):
            return None
        billed = msgspec.convert(answer.meta, _Meta).billed_units
        return None if billed is None else Usage(int(billed.input_tokens), int(billed.output_tokens))
    if usage.prompt_tokens is None:
        return _in_other_terms(usage)
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)


def _in_other_terms(usage: _Usage) -> Usage | None:
    if usage.tokens is not None:
        cached = None if usage.cached_tokens is None else int(usage.cached_tokens)
        return Usage(int(usage.tokens.input_tokens), int(usage.tokens.output_tokens), cached)
    if usage.input_tokens is None:
        return None if usage.seconds is None else Usage(math.ceil(usage.seconds * AUDIO_TOKENS_PER_S))
    if usage.input_tokens_details is not None:
        cached, more = usage.input_tokens_details.cached_tokens, 0
    else:
        cached = usage.cache_read_input_tokens
        more = (cached or 0) + (usage.cache_creation_input_tokens or 0)
    return Usage(usage.input_tokens + more, usage.output_tokens or 0, cached)
