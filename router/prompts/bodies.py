"""A request's body by its path, and the configured model or adapter that its model name selects.

A chat is decoded once, for the proxy and for its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

from kvatlas.publisher.block_hash import NO_EXTRAS, PromptExtras
from kvatlas.router.openai import apis
from kvatlas.router.openai.body import Peek, named_session
from kvatlas.router.openai.guarded import GUARDED
from kvatlas.router.openai.numbers import lax_whole, whole_number
from kvatlas.router.prompts.chat.anthropic import MessagesBody, decode_messages
from kvatlas.router.prompts.chat.responses import ResponsesBody, decode_responses
from kvatlas.router.prompts.prompt import chat_pieces, completion_pieces
from kvatlas.router.prompts.request import (
    NULL,
    VALUES_MAX,
    BatchBody,
    ChatBody,
    ChatFields,
    CompletionBody,
    GenerateBody,
    NotLocalError,
    compact,
    decode_batch,
    decode_chat,
    decode_completion,
    decode_generate,
)
from kvatlas.router.prompts.settings import ANY_MODEL, ModelPrompts

Converted = MessagesBody | ResponsesBody
"""APIs that the engine converts to a chat."""
Parsed = ChatBody | CompletionBody | BatchBody | GenerateBody | Converted

_DECODE: Final[dict[str, Callable[[bytes], Parsed]]] = {
    apis.CHAT: decode_chat,
    apis.COMPLETION: decode_completion,
    apis.BATCH: decode_batch,
    apis.MESSAGES: decode_messages,
    apis.RESPONSES: decode_responses,
    apis.GENERATE: decode_generate,
}
# Bounds of numbers that clients send: JSON allows thousands of digits. No engine has a longer context.
TOKENS_MAX: Final = 1 << 31
# vLLM refuses more (``VLLM_MAX_N_SEQUENCES``, 0.32).
ANSWERS_MAX: Final = 1 << 14
# Larger bodies may have too many values to be decoded: each takes two bytes.
_DECODED_BYTES_MAX: Final = 2 * VALUES_MAX
# Between two texts of a list, as clients write them.
_NEXT_TEXT: Final = re.compile(rb'",[ \n]{0,16}"')
_NEAR_BYTES: Final = 4096
# Quotes within texts are escaped.
_ANSWERS: Final = re.compile(rb'"n"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}("[^"\\]{1,64}"|[0-9.eE+-]{1,64})')
_FIRST_FIELD: Final = {apis.COMPLETION: b'"prompt"', apis.RESPONSES: b'"input"'}


def decode_body(path: str, body: bytes) -> Parsed:
    """Decode the fields that decide the prompt. Raises ``NotLocalError``, or ``ApiError`` 400."""
    decode = _DECODE.get(path)
    if decode is None:
        raise NotLocalError("endpoint")
    return decode(body)


class _Chat(ChatBody, gc=False, kw_only=True):
    """A chat with all fields that are checked in its request."""

    model: str | None = None
    stream: bool | None = False
    kv_transfer_params: Any = msgspec.UNSET
    priority: msgspec.Raw = NULL
    session_id: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL


_OTHERS: Final = tuple(name for name in GUARDED if name != "kv_transfer_params")
_CHAT: Final = msgspec.json.Decoder(
    msgspec.defstruct(
        "_GuardedChat",
        [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in _OTHERS],
        bases=(_Chat,),
        gc=False,
        kw_only=True,
    )
)
_UNGUARDED: Final = (msgspec.UNSET,) * len(_OTHERS)


def peek_chat(path: str, body: bytes) -> Peek | None:
    """Peek at a chat and decode the fields of its prompt together; None for other requests, large bodies and
    unusual fields, for which ``peek`` is used."""
    if path != apis.CHAT or len(body) > _DECODED_BYTES_MAX:
        return None
    try:
        chat: _Chat = _CHAT.decode(body)  # type: ignore[assignment]  # made at run time, of this base
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if (
        chat.kv_transfer_params is not msgspec.UNSET
        or msgspec.structs.astuple(chat)[-len(_OTHERS) :] != _UNGUARDED
    ):
        return None
    chat.kv_transfer_params = None
    priority = None if chat.priority is NULL else whole_number(chat.priority, "priority")
    prioritized = chat.priority is not NULL and bytes(chat.priority) != b"null"
    look = Peek(chat.model, chat.stream is True, priority=priority, prioritized=prioritized, prompt=chat)
    if chat.session_id is chat.metadata is chat.prompt_cache_key is NULL:
        return look
    session = named_session(bytes(chat.session_id), bytes(chat.prompt_cache_key), bytes(chat.metadata))
    return msgspec.structs.replace(look, session=session)


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


def pieces_of(parsed: Parsed) -> Iterator[bytes]:
    """The text of the (first) prompt, in order. Raises ``ApiError`` 400 for a wrong type."""
    if isinstance(parsed, ChatBody):
        return chat_pieces(parsed)
    if isinstance(parsed, CompletionBody):
        return completion_pieces(parsed)
    return parsed.pieces()


def prompt_field(path: str) -> bytes:
    """The key at which the prompt begins in a body that is not decoded."""
    return _FIRST_FIELD.get(path, b'"messages"')


_ENCODER = msgspec.json.Encoder()


class ModelTarget:
    """The model of a request: its configuration's name, and the adapter."""

    __slots__ = ("lora_name", "name", "unsalted", "unsalted_scope")

    def __init__(self, name: str, lora_name: str | None = None, lora_path: str | None = None) -> None:
        self.name = name
        self.lora_name = lora_name
        # Extra inputs and scope of a prompt without a salt.
        self.unsalted = NO_EXTRAS if lora_name is None else PromptExtras(lora_name, lora_path)
        self.unsalted_scope = self._scope(self.unsalted)

    def extras(self, salt: Any) -> PromptExtras:
        """Return the extra inputs of hashes besides tokens and images. Raises ``NotLocalError`` for an
        invalid salt."""
        if salt is None:
            return self.unsalted
        if not (isinstance(salt, str) and salt):
            raise NotLocalError("field")
        return msgspec.structs.replace(self.unsalted, cache_salt=salt)

    def scope(self, extras: PromptExtras) -> bytes:
        """Return the inputs that separate prompts of equal text: the model, and the extra inputs of
        hashes."""
        return self.unsalted_scope if extras is self.unsalted else self._scope(extras)

    def _scope(self, extras: PromptExtras) -> bytes:
        return compact(_ENCODER.encode([self.name, extras]))


_adapter: Final = lru_cache(maxsize=1024)(ModelTarget)
"""Cached, since the scope of each is encoded."""


class ModelNames:
    """The configured models by served name (``*``: any other); ``is_adapter`` tells LoRA names."""

    def __init__(self, models: Mapping[str, ModelPrompts], is_adapter: Callable[[str], bool]) -> None:
        self.models = dict(models)
        self._is_adapter = is_adapter
        self._named = {name: ModelTarget(name) for name in models if name != ANY_MODEL}
        self._any = ModelTarget(ANY_MODEL) if ANY_MODEL in models else None
        bases = [name for name in models if name != ANY_MODEL] or list(models)
        self._only = ModelTarget(bases[0]) if len(bases) == 1 else None

    def target(self, model: str | None) -> ModelTarget:
        """Resolve a model name. Raises ``NotLocalError`` for an unknown name."""
        if model is None:
            if self._only is None:
                raise NotLocalError("model_unknown")
            return self._only
        found = self._named.get(model)
        if found is not None:
            return found
        # Engines may report adapters at any time.
        for name, config in self.models.items():
            if model in config.lora_paths:
                return _adapter(name, model, config.lora_paths[model])
        if self._any is not None and not self._is_adapter(model):
            return self._any
        raise NotLocalError("lora_path_unknown" if self.models else "model_unknown")
