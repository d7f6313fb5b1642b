"""The fields of a chat or completion request that decide its prompt, and the sizes of decoded values.

Messages, prompt and tools stay raw JSON, so that a next turn decodes only its new messages. Optional
fields are typed ``Any``: a wrong type there is the engine's to reject. Wrong types in what every request
must have (``messages``, ``prompt``) are refused here with the field's name and what to send.

All other fields are skipped. Caches are bounded by the estimated sizes, so they must not be too low: a
megabyte of empty lists takes twenty when decoded. Long values that are only compared are kept as digests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar, Final, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec.structs import astuple

from kvatlas.publisher.block_hash import NO_EXTRAS, PromptExtras
from kvatlas.router.openai.body import decode_leniently, invalid_json
from kvatlas.router.openai.errors import ApiError, bad_request

NULL = msgspec.Raw(b"null")


class NotLocalError(Exception):
    """This prompt cannot be computed exactly here; ``reason`` is one of ``settings.REASONS``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rest(msgspec.Struct, frozen=True, gc=False):
    """The prompts of a request behind its first one: how many, how long together, and the longest. In tokens
    if the request gives tokens, else in characters, from which ``in_tokens`` estimates them."""

    prompts: int = 0
    size: int = 0
    longest: int = 0
    given: bool = True
    """The sizes are exact numbers of tokens."""

    def in_tokens(self, tokens: int, chars: int) -> Rest:
        """Estimate the tokens of texts by those of the first prompt, of this many characters."""
        if self.given:
            return self
        # At least a token for four characters: the first text may be an unusual one.
        share = max(_TOKENS_PER_CHAR_MIN, min(1.0, tokens / max(chars, _CHARS_MIN)))
        return Rest(self.prompts, round(self.size * share), round(self.longest * share), given=False)

    def cut(self, keep: Any) -> Rest:
        """Apply ``truncate_prompt_tokens``; -1: to what the engine takes."""
        if type(keep) is not int or not self.prompts:
            return self
        if keep < 0:
            return Rest(self.prompts, self.size, 0, self.given)
        return Rest(self.prompts, min(self.size, self.prompts * keep), min(self.longest, keep), self.given)


NO_REST: Final = Rest()
_TOKENS_PER_CHAR_MIN: Final = 0.25
# Shorter texts say little of others: their special tokens count among theirs.
_CHARS_MIN: Final = 64


def rest_of(sizes: Sequence[int], *, given: bool) -> Rest:
    """Return the prompts of these sizes, behind the first."""
    return Rest(len(sizes), sum(sizes), max(sizes), given) if sizes else NO_REST


class ChatFields(msgspec.Struct, gc=False, kw_only=True):
    """Fields of ``POST /v1/chat/completions`` that reach the prompt, besides messages (vLLM 0.32 protocol).

    From ``max_tokens`` on they do so only together with one of the others.
    """

    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    reasoning_effort: Any = None
    add_special_tokens: Any = False
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    cache_salt: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    prompt_logprobs: Any = None
    echo: Any = False
    n: Any = None
    min_tokens: Any = None

    def skips_cache(self) -> bool:
        """Whether prompt log-probabilities are computed, also for ``echo``: the engine reads no cache
        then."""
        return self.prompt_logprobs is not None or self.echo is True


class ChatBody(ChatFields, gc=False, kw_only=True):
    """A chat. ``orders_tool_calls``: the engine's validation reorders their fields."""

    orders_tool_calls: ClassVar[bool] = True
    messages: list[msgspec.Raw]

    def is_bare(self) -> bool:
        """Whether the prompt depends on the messages alone: no other field that reaches it was given."""
        return (
            astuple(self)[:_NUM_PROMPT_FIELDS] == _BARE
            and self.tools is NULL
            and self.add_generation_prompt is True  # 1 is equal to it
            and self.continue_final_message is self.add_special_tokens is False
            and self.orders_tool_calls
        )


_NUM_PROMPT_FIELDS: Final = ChatBody.__struct_fields__.index("max_tokens")
# The first fields, up to those of the answer, if none of them was given.
_BARE: Final = astuple(ChatBody(messages=[]))[:_NUM_PROMPT_FIELDS]


class BatchBody(ChatFields, gc=False, kw_only=True):
    """Fields of ``POST /v1/chat/completions/batch`` that reach the prompts: several chats, never with
    tools."""

    messages: list[list[msgspec.Raw]]

    def first(self) -> ChatBody:
        """The first chat. Raises ``NotLocalError`` if there is none."""
        if not self.messages:
            raise NotLocalError("empty")
        fields = {name: getattr(self, name) for name in ChatFields.__struct_fields__ if name != "tools"}
        return ChatBody(messages=self.messages[0], **fields)

    def sizes(self) -> list[int]:
        """Characters of each chat, about."""
        return [sum(map(len, messages)) for messages in self.messages]

    def pieces(self) -> Iterator[bytes]:
        """The messages of the first chat, unchanged."""
        yield from map(bytes, self.messages[0] if self.messages else ())


class GenerateBody(msgspec.Struct, gc=False):
    """Fields of ``POST /inference/v1/generate`` that reach the prompt: its tokens."""

    token_ids: list[int]
    features: Any = None
    content_parts: Any = None
    sampling_params: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None

    def skips_cache(self) -> bool:
        """Whether the engine reads no cache: asked for, or prompt log-probabilities are computed
        (``SamplingParams.__post_init__``, vLLM 0.32)."""
        params = self.sampling_params
        if not isinstance(params, dict):
            return False
        if (asked := params.get("skip_reading_prefix_cache")) is not None:
            return asked is True
        return any(params.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids"))

    def pieces(self) -> Iterator[bytes]:
        """The tokens as JSON."""
        yield msgspec.json.encode(self.token_ids)


class CompletionBody(msgspec.Struct, gc=False):
    """Fields of ``POST /v1/completions`` that reach the prompt (vLLM 0.32 protocol)."""

    prompt: msgspec.Raw = NULL
    suffix: Any = None
    prompt_embeds: Any = None
    add_special_tokens: Any = True
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    max_tokens: Any = 16
    cache_salt: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    prompt_logprobs: Any = None
    echo: Any = False
    logprobs: Any = None
    n: Any = None
    min_tokens: Any = None

    def skips_cache(self) -> bool:
        """Whether prompt log-probabilities are computed: the engine reads no cache then."""
        return self.prompt_logprobs is not None or (self.echo is True and self.logprobs is not None)


TextOrTokens = str | list[int] | list[list[int]] | list[str] | None

_CHAT = msgspec.json.Decoder(ChatBody)
_BATCH = msgspec.json.Decoder(BatchBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_ANY = msgspec.json.Decoder()


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The usual message: a role and a text."""

    role: Literal["user", "assistant"]
    content: str


_PLAIN = msgspec.json.Decoder(PlainMessage)
_INVALID = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def decode_chat(body: bytes) -> ChatBody:
    """The chat fields of a body. Raises ``ApiError`` 400 for no JSON object or ``messages`` of wrong type."""
    try:
        return _CHAT.decode(body)
    except msgspec.ValidationError:
        raise _wrong_messages() from None
    except _INVALID as error:
        try:
            return _CHAT.decode(_reencoded(body, error, ChatBody))
        except msgspec.ValidationError:
            raise _wrong_messages() from None


def decode_completion(body: bytes) -> CompletionBody:
    """The completion fields of a body. Raises ``ApiError`` 400 for no JSON object."""
    try:
        return _COMPLETION.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_json(error) from None
    except _INVALID as error:
        return _COMPLETION.decode(_reencoded(body, error, CompletionBody))


Struct = TypeVar("Struct")


def decode_fields(body: bytes, decoder: msgspec.json.Decoder[Struct]) -> Struct:
    """The fields of a body that the engine checks. Raises ``NotLocalError``: it refuses another shape."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise NotLocalError("message_shape") from None
    except _INVALID:
        raise NotLocalError("unusual_json") from None


def decode_batch(body: bytes) -> BatchBody:
    """Implement ``decode_fields``."""
    return decode_fields(body, _BATCH)


def decode_generate(body: bytes) -> GenerateBody:
    """Implement ``decode_fields``."""
    return decode_fields(body, _GENERATE)


def plain_message(raw: msgspec.Raw) -> PlainMessage | None:
    """A plain message: two values of any length; None for any other."""
    try:
        return _PLAIN.decode(raw)
    except _INVALID:
        return None


def decode_message(raw: msgspec.Raw, index: int) -> dict[str, Any]:
    """Message number ``index``, checked for the types every engine demands. Raises ``ApiError`` 400."""
    try:
        message = _ANY.decode(raw)
    except _INVALID as error:
        raise invalid_json(error) from None
    if not isinstance(message, dict):
        raise _wrong_type(f"messages[{index}]", message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong_type(f"messages[{index}].role", role, "a string such as 'user' or 'assistant'")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise _wrong_type(f"messages[{index}].content", content, "a string or a list of content parts")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise _wrong_type(f"messages[{index}].tool_calls", tool_calls, "a list of tool calls")
    return message


def decode_prompt(raw: msgspec.Raw) -> TextOrTokens:
    """The prompt in one of its four forms, or None where absent. Raises ``ApiError`` 400 otherwise."""
    try:
        prompt = _ANY.decode(raw)
    except _INVALID as error:
        raise invalid_json(error) from None
    if prompt is None or isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        # A prompt may be a million ids: no frame and no step of Python for each.
        kinds = set(map(type, prompt))
        if kinds <= {int} or kinds == {str}:
            return prompt
        if kinds == {list} and set(map(type, chain.from_iterable(prompt))) <= {int}:
            return prompt
    raise _wrong_type("prompt", prompt, "a string, a list of strings, or lists of token ids")


def first_prompt(prompt: TextOrTokens) -> tuple[str | list[int], Rest]:
    """The first of the prompts, and the others. Raises ``NotLocalError`` where there is none."""
    if not prompt:
        raise NotLocalError("empty")
    if isinstance(prompt, str):
        return prompt, NO_REST
    first = prompt[0]
    if isinstance(first, int):
        return cast("list[int]", prompt), NO_REST
    sizes = list(map(len, cast("list[str]", prompt[1:])))
    return first, rest_of(sizes, given=isinstance(first, list))


def decode_any(raw: msgspec.Raw) -> Any:
    """Decode a JSON value that was left raw. Raises ``ApiError`` 400 if the bytes are no JSON."""
    try:
        return _ANY.decode(raw)
    except _INVALID as error:
        raise invalid_json(error) from None


def _reencoded(body: bytes, error: Exception, fields: type[msgspec.Struct]) -> bytes:
    """Re-encode the prompt's part of a body that only Python's JSON parser accepts, so that the fast one
    reads it."""
    found = decode_leniently(body, error)
    wanted = {name: found[name] for name in fields.__struct_fields__ if name in found}
    try:
        return json.dumps(wanted, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise NotLocalError("unusual_json") from None


def _wrong_messages() -> ApiError:
    return bad_request(
        "invalid_type",
        "messages must be a list of message objects, each with role and content.",
        param="messages",
    )


def _wrong_type(field: str, value: object, wanted: str) -> ApiError:
    name = "missing" if value is None else _JSON_NAMES.get(type(value), type(value).__name__)
    return bad_request("invalid_type", f"{field} is {name}; send {wanted}.", param=field)


_JSON_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list of something else",
    dict: "an object",
}


# Values that take more than this fraction of a cache are not cached: one client would empty it.
SHARE: Final = 4
_TEXTS: Final = frozenset({str, type(None)})
_PLAIN_BYTES_MAX: Final = 256
# Size of raw JSON besides its bytes.
_RAW_BYTES: Final = 100
# Size of a multimodal item besides its identifier.
_ITEM_BYTES: Final = 200


# Larger bodies are processed in a thread: rendering takes about 0.6 us per KB.
INLINE_BYTES_MAX: Final = 1 << 18
# Bodies with more lists and objects too: a message takes about 15 us to convert, decode, check and render.
INLINE_VALUES_MAX: Final = 512
# Decoding more of them holds the interpreter for 10 ms and longer, in any thread.
VALUES_MAX: Final = 50_000
_COUNTED_TOGETHER_MIN: Final = 4096
# Larger windows do not fit the processor's cache, and their copies are returned to the system each time.
_WINDOW_BYTES: Final = 1 << 16
_OPENING: Final = ord("{")
_BRACKETS_DIFFER: Final = np.uint8(ord("{") - ord("["))


def num_values(data: bytes | msgspec.Raw) -> int:
    """Upper bound of the lists and objects in JSON: brackets within texts count too."""
    if len(data) < _COUNTED_TOGETHER_MIN:
        data = bytes(data)
        return data.count(b"{") + data.count(b"[")
    # Both in one pass, which is six times as fast for longer data.
    count, numbers = 0, np.frombuffer(data, np.uint8)
    for start in range(0, len(data), _WINDOW_BYTES):
        window = numbers[start : start + _WINDOW_BYTES]
        count += int(np.count_nonzero((window | _BRACKETS_DIFFER) == _OPENING))
    return count


def has_many_values(data: bytes | msgspec.Raw, limit: int) -> bool:
    """Whether JSON may have more lists and objects than this; each takes two bytes at least."""
    return len(data) > 2 * limit and num_values(data) > limit


def compact(data: bytes) -> bytes:
    """``data``, or its digest if that is shorter: equal exactly if the data are, also against chosen
    inputs."""
    return data if len(data) <= _PLAIN_BYTES_MAX else blake2b(data, digest_size=32).digest()


def kept_bytes(value: Any) -> int:
    """Memory of a decoded JSON value, or of structs of such and raw JSON, with everything in it."""
    if type(value) is dict and _TEXTS.issuperset(map(type, value.values())):  # most messages
        return sum(map(sys.getsizeof, (value, *value, *value.values())))
    size, waiting = 0, [value]
    while waiting:
        current = waiting.pop()
        # sys.getsizeof of one is meaningless.
        if isinstance(current, msgspec.Raw):
            size += _RAW_BYTES + len(current)
            continue
        size += sys.getsizeof(current)
        if isinstance(current, dict):
            waiting.extend(current)
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
        elif isinstance(current, msgspec.Struct):
            waiting.extend(msgspec.structs.astuple(current))
    return size


def extras_bytes(extras: PromptExtras) -> int:
    """The same for the extra inputs of hashes; names of adapters belong to the configuration."""
    if extras is NO_EXTRAS:
        return 0
    salt = 0 if extras.cache_salt is None else sys.getsizeof(extras.cache_salt)
    return salt + sum(_ITEM_BYTES + sys.getsizeof(item.identifier) for item in extras.multimodal)
