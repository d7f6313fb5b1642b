"""Which streams may go on from another engine if theirs breaks, by the bodies of their requests.

Rules are those of vLLM 0.32 (entrypoints/openai/*/protocol.py). Invariant: nothing goes on where another
answer could come of it, and a member that is not known here is one of these. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.numbers import lax_true, lax_whole
from kvatlas.router.proxy.stop_strings import StopRules

_Raw = msgspec.Raw
_MEMBERS: Final = msgspec.json.Decoder(dict[str, _Raw])

# Members that mean the same for the rest of an answer as for all of it.
_KEPT: Final = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",  # counts the prompt too
        "stop_token_ids",
        "include_stop_str_in_output",
        "allowed_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "thinking_token_budget",  # counts the prompt too
        "return_tokens_as_token_ids",
        "cache_salt",
        "priority",
        "stream_interval",
        "session_id",
        "user",
    }
)
_CHANGED: Final = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
    }
)
# Members that only make the prompt, whose ids are known, or that vLLM ignores.
_OF_PROMPT: Final = frozenset(
    {
        "messages",
        "prompt",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "truncate_prompt_tokens",
        "truncation_side",
        "reasoning_effort",
        "include_reasoning",
        "parallel_tool_calls",
        "request_id",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "length_penalty",
        "return_prompt_text",
        "mm_payload",
        "return_mm_kwargs",
        "return_token_offsets",
    }
)
# Any other member must be off. The reason is the label of a metric.
_REASONS: Final = {
    "n": "answers",
    "best_of": "answers",
    "use_beam_search": "answers",
    "tools": "tools",
    "tool_choice": "tools",
    "functions": "tools",
    "function_call": "tools",
    "response_format": "format",
    "structured_outputs": "format",
    "guided_json": "format",
    "guided_regex": "format",
    "guided_choice": "format",
    "guided_grammar": "format",
    "presence_penalty": "penalty",
    "bad_words": "bad_words",
    "repetition_detection": "repetition",
    "prompt_embeds": "media",
}
_OTHER: Final = "parameter"
_OFF: Final = frozenset({b"null", b"false", b"[]", b"{}", b'""', b"0", b"0.0", b"-1"})
_ONE: Final = frozenset({b"1", b"null"})
_TEXT_FORMAT: Final = re.compile(rb'\{\s*"type"\s*:\s*"text"\s*\}')
SEED_MAX: Final = 2**63 - 1
_STOPS_MAX, _STOP_CHARS_MAX = 64, 4096
TOKENS_MAX: Final = 1 << 31
# Of a completion that does not say how long it is to be.
_COMPLETION_TOKENS: Final = 16


class ContinuationPlan(msgspec.Struct, frozen=True, gc=False):
    """A request whose stream may go on elsewhere, as its body says."""

    path: str
    members: dict[str, _Raw]
    """Passed on as they are."""
    max_tokens: int | None = None
    """None: as many as the context allows."""
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: StopRules = StopRules()
    logprobs: int | None = None
    skips_special: bool = True
    wants_usage: bool = False
    in_chunks: bool = False
    """Its client wants the usage in every event."""
    tools: bool = False
    """Its answer may be calls of tools."""
    parses: bool = False
    """Engines may be asked to read reasoning and calls out of ids."""
    body: bytes = b""
    """Of the request, where they are asked for that."""

    @property
    def chat(self) -> bool:
        return self.path == CHAT


class _Options(msgspec.Struct, gc=False):
    include_usage: Any = None
    continuous_usage_stats: Any = None


def plan_of(path: str, body: bytes, *, parses: bool = False) -> ContinuationPlan | str:
    """Whether the stream of this request may go on elsewhere; else the reason why not (a label). ``parses``:
    as of the plan."""
    if path not in (CHAT, COMPLETION):
        return "api"
    try:
        members = _MEMBERS.decode(body)
        reasons = (_refused(name, value, parses) for name, value in members.items())
        if reason := next(filter(None, reasons), ""):
            return reason
        members = {name: one for name, one in members.items() if _begin(one) != b"null"}
        return _plan(path, members, body if parses and path == CHAT else b"")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError):
        return _OTHER


def _begin(value: _Raw) -> bytes:
    return bytes(memoryview(value)[:64])


def _refused(name: str, value: _Raw, parses: bool) -> str:
    """Why a stream with this member does not go on elsewhere; "": it may."""
    raw = _begin(value)
    if name in _KEPT or name in _CHANGED or name in _OF_PROMPT:
        # A list of prompts.
        several = name == "prompt" and raw.translate(None, b" \t\r\n").startswith((b"[[", b'["'))
        return "answers" if several else ""
    if name == "return_token_ids":
        off = False  # the client's own; of two members with one name engines take the last
    elif name in {"n", "best_of"}:
        off = raw in _ONE
    elif name == "tools" and parses:
        off = True
    elif name == "tool_choice":
        # Without tools to call, or where none may be called, an answer is text.
        off = raw in {b'"none"', b'"auto"'} or raw in _OFF
    else:
        off = raw in _OFF or (name == "response_format" and _TEXT_FORMAT.fullmatch(raw) is not None)
    return "" if off else _REASONS.get(name, _OTHER)


def _plan(path: str, members: dict[str, _Raw], read: bytes) -> ContinuationPlan | str:
    def value(name: str) -> Any:
        return msgspec.json.decode(members[name]) if name in members else None

    def whole(name: str, least: int) -> int | None:
        if name not in members:
            return None
        number = lax_whole(value(name))
        if number is None or not least <= number < TOKENS_MAX:
            raise ValueError(name)
        return number

    chat = path == CHAT
    stop = value("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stop) > _STOPS_MAX or not all(
        isinstance(one, str) and len(one) <= _STOP_CHARS_MAX for one in stop
    ):
        return _OTHER
    options = msgspec.convert(value("stream_options") or {}, _Options)
    limit = whole("max_completion_tokens", 0) if chat else None
    limit = whole("max_tokens", 0) if limit is None else limit
    logprobs = None
    if chat and lax_true(value("logprobs")):
        logprobs = whole("top_logprobs", 0) or 0
    elif not chat:
        logprobs = whole("logprobs", 0)
    tools = "tools" in members and _begin(members["tools"]) not in _OFF
    if tools and (not chat or stop or logprobs is not None):
        return "tools"  # derendered text has neither
    seed = lax_whole(value("seed"))
    if (seed is None and value("seed") is not None) or (seed is not None and abs(seed) > SEED_MAX):
        return _OTHER
    bias = msgspec.convert(value("logit_bias") or {}, dict[str, float], strict=False)
    return ContinuationPlan(
        path,
        {name: one for name, one in members.items() if name in _KEPT},
        max_tokens=limit if chat or limit is not None else _COMPLETION_TOKENS,
        frequency_penalty=msgspec.convert(value("frequency_penalty") or 0.0, float, strict=False),
        logit_bias={str(int(token)): bound for token, bound in bias.items()},
        seed=seed,
        stop=StopRules(
            tuple(one for one in stop if one),
            lax_true(value("include_stop_str_in_output")),
            whole("min_tokens", 0) or 0,
        ),
        logprobs=logprobs,
        skips_special="skip_special_tokens" not in members or lax_true(value("skip_special_tokens")),
        wants_usage=lax_true(options.include_usage),
        in_chunks=lax_true(options.include_usage) and lax_true(options.continuous_usage_stats),
        tools=tools,
        parses=bool(read),
        body=read,
    )
