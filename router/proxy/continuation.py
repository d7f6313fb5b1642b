"""A stream that breaks goes on from another engine, unseen: what is kept of it, what is asked, how it reads.

While a stream passes, the engine says the ids of its tokens (``return_token_ids``), which are kept and taken
out again (``KeptStream``). After a break another engine is asked for a completion whose prompt is the ids of
the prompt and of the answer so far, and its events become events of the first stream (``ContinuedStream``).
Shapes and rules are those of vLLM 0.32 (entrypoints/openai/*/serving.py, v1/engine/detokenizer.py).

Invariants: ids of an event that the client does not get are not kept; nothing is asked where another answer
could come of it (``plan_of``); a stream that has said why it ended is only closed. Pure.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.numbers import lax_true, lax_whole
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.events import ERROR_MARK, Kind, blocks, data_of, last_event_end, read_event
from kvatlas.router.proxy.stop_strings import UNFINISHED, Decode, StoppingText, StopRules

_Raw = msgspec.Raw
_MEMBERS: Final = msgspec.json.Decoder(dict[str, _Raw])
_encoded: Final = msgspec.json.Encoder().encode

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
# Of these, what the cache of the prompt depends on, and the engine's order.
_OF_CACHE: Final = frozenset({"model", "cache_salt", "priority", "session_id", "user"})
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
# vLLM bounds the biases that it takes.
_BIAS_MAX: Final = 100.0
_SEED_MAX: Final = 2**63 - 1
_STOPS_MAX, _STOP_CHARS_MAX = 64, 4096
_TOKENS_MAX: Final = 1 << 31
# Engines are stopped one after another: more often than this something else ends the answers.
_ABORTS_MAX: Final = 16
# Ids kept of an answer: 4 MB.
_IDS_MAX: Final = 1 << 20
# An unfinished event may hold the ids of a whole prompt.
_EVENT_BYTES_MAX: Final = 32 << 20
# Tokens of one character that may be missing its end (measured: up to 8).
_DROPPED_MAX: Final = 8
_DECODED_LEN: Final = 64
# Of the prompt: how the first text of an answer reads may depend on it.
_CONTEXT_LEN: Final = 8
# Tokens decoded in one step: 0.4 ms.
_STEP_LEN: Final = 4096
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

    @property
    def chat(self) -> bool:
        return self.path == CHAT


class _Options(msgspec.Struct, gc=False):
    include_usage: Any = None
    continuous_usage_stats: Any = None


def plan_of(path: str, body: bytes) -> ContinuationPlan | str:
    """Whether the stream of this request may go on elsewhere; else the reason why not (a label)."""
    if path not in (CHAT, COMPLETION):
        return "api"
    try:
        members = _MEMBERS.decode(body)
        reason = next((found for name, value in members.items() if (found := _refused(name, value))), "")
        return reason or _plan(path, {name: one for name, one in members.items() if _begin(one) != b"null"})
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError):
        return _OTHER


def _begin(value: _Raw) -> bytes:
    return bytes(memoryview(value)[:64])


def _refused(name: str, value: _Raw) -> str:
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
    elif name == "tool_choice":
        # Without tools to call, or where none may be called, an answer is text.
        off = raw in {b'"none"', b'"auto"'} or raw in _OFF
    else:
        off = raw in _OFF or (name == "response_format" and _TEXT_FORMAT.fullmatch(raw) is not None)
    return "" if off else _REASONS.get(name, _OTHER)


def _plan(path: str, members: dict[str, _Raw]) -> ContinuationPlan | str:
    def value(name: str) -> Any:
        return msgspec.json.decode(members[name]) if name in members else None

    def whole(name: str, least: int) -> int | None:
        if name not in members:
            return None
        number = lax_whole(value(name))
        if number is None or not least <= number < _TOKENS_MAX:
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
    seed = value("seed")
    if seed is not None and (lax_whole(seed) is None or abs(lax_whole(seed) or 0) > _SEED_MAX):
        return _OTHER
    bias = msgspec.convert(value("logit_bias") or {}, dict[str, float], strict=False)
    return ContinuationPlan(
        path,
        {name: one for name, one in members.items() if name in _KEPT},
        max_tokens=limit if chat or limit is not None else _COMPLETION_TOKENS,
        frequency_penalty=msgspec.convert(value("frequency_penalty") or 0.0, float, strict=False),
        logit_bias={str(int(token)): bound for token, bound in bias.items()},
        seed=lax_whole(seed),
        stop=StopRules(
            tuple(one for one in stop if one),
            lax_true(value("include_stop_str_in_output")),
            whole("min_tokens", 0) or 0,
        ),
        logprobs=logprobs,
        skips_special="skip_special_tokens" not in members or lax_true(value("skip_special_tokens")),
        wants_usage=lax_true(options.include_usage),
        in_chunks=lax_true(options.include_usage) and lax_true(options.continuous_usage_stats),
    )


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Logprobs(msgspec.Struct, gc=False):
    """Of completions."""

    text_offset: list[int] = []
    token_logprobs: list[_Raw] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, _Raw] | None] = []


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Raw = _Raw(b"null")
    finish_reason: str | None = None
    stop_reason: _Raw = _Raw(b"null")
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Any = None
    system_fingerprint: _Raw = _Raw(b"null")


_EVENT: Final = msgspec.json.Decoder(_Event)
_LOGPROBS: Final = msgspec.json.Decoder(_Logprobs | None)
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, _Raw]])
# In a string, their quotes would be escaped.
_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_GOES_ON: Final = b'"finish_reason":null'
_NO_DELTA: Final = b'"delta":{}'
# Of an event with one token, before its id.
_MARKS: Final = (
    b'"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[',
    b'"finish_reason":null,"token_ids":[',
)
_EMPTY: Final = b'"delta":{},"logprobs":null,'
_LINE_ENDS: Final = 2
_EVENT_ENDS: Final = b"}\n\n"
_DONE: Final = b"data: [DONE]\n\n"
_UNREAD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


class KeptStream:
    """A stream on its way to the client: what is kept of it, and its events without the ids.

    ``known``: the ids of the prompt, where the router has them. ``feed`` gives whole events.
    """

    __slots__ = (
        "_ends",
        "_known",
        "_last",
        "_mark",
        "_partial",
        "_reasoned",
        "_seen",
        "_settled",
        "_spoken",
        "aborts",
        "broken",
        "chars",
        "complete",
        "done",
        "failed",
        "ids",
        "plan",
        "prompt",
        "prompt_tokens",
        "told",
        "unable",
        "usage_sent",
    )

    def __init__(self, plan: ContinuationPlan, known: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.ids: array[int] = array("I")
        """Of the answer's tokens."""
        self.prompt: bytes | Sequence[int] = b""
        """Ids of the prompt: JSON as the engine gave it, or the router's own."""
        self.prompt_tokens = 0
        self.chars = 0
        """Characters of text that the client has had, where there are stop strings."""
        self.unable = ""
        """Why this stream cannot go on elsewhere (a label)."""
        self.told = 0
        """Tokens of which the client had an event when it went on last, also those dropped from ``ids``."""
        self.broken = False
        """It has gone on before since an engine broke it."""
        self.aborts = 0
        """Times that it has gone on since an engine that was stopped gave it up."""
        self.complete = False
        """It has said why it ended."""
        self.usage_sent = self.done = False
        self.failed = 0
        """Status of an error that the engine sent; it and what follows are not passed on."""
        self._known = known
        self._mark = _MARKS[plan.chat]
        self._partial = bytearray()
        self._seen = 0
        self._last = b""
        self._spoken = not plan.chat
        self._reasoned = False
        self._ends: deque[int] = deque(maxlen=_DROPPED_MAX + 1)
        """Of the latest tokens in the text, for ``text_offset``."""
        # Later events need no look at what they say.
        self._settled = False

    def feed(self, data: bytes) -> bytes:
        """The whole events in what came, without ids; what has come of another one waits for its end."""
        if self._settled and data.endswith(_EVENT_ENDS) and not self._partial:
            # By far the most pieces are one event with one token.
            at = data.rfind(self._mark)
            if at >= 0 and data.count(b"\n") == _LINE_ENDS and not data.endswith(_EMPTY, 0, at):
                at += len(self._mark)
                end = data.find(b"]", at)
                try:
                    self.ids.append(int(data[at:end]))
                except _UNREAD:
                    pass  # several, or none
                else:
                    self._last = passed = b"%bnull%b" % (data[: at - 1], data[end + 1 :])
                    return passed
        if self._partial or not data.endswith(b"\n\n"):
            partial = self._partial
            partial += data
            end = last_event_end(partial, max(0, self._seen - 3))
            if not end and len(partial) < _EVENT_BYTES_MAX:
                self._seen = len(partial)
                return b""
            if not end:
                self.unable, end = "size", len(partial)
            data = bytes(partial[:end])
            del partial[:end]
            self._seen = len(partial)
        if data.count(b"\n\n") == 1 and data.endswith(b"\n\n"):
            return b"" if self.failed else self._event(data)
        return b"".join([self._event(block) for block in blocks(data) if not self.failed])

    def rest(self) -> bytes:
        """The rest of a stream that ended: an event without its end."""
        rest = bytes(self._partial)
        self._partial.clear()
        return rest and self._event(rest)

    def _event(self, block: bytes) -> bytes:
        at = block.rfind(_IDS)
        if at < 0:
            return self._without_ids(block)
        if not self._settled and block.find(_PROMPT_IDS) >= 0:
            block = self._without_prompt(block)
            at = block.rfind(_IDS)
        at += len(_IDS) - 1
        end = block.find(b"]", at)
        passed = b"%bnull%b" % (block[:at], block[end + 1 :])
        if passed.find(_GOES_ON) < 0 and not self._ends_so(passed):
            return passed  # an abort: its token is none of the answer's
        try:
            if end > at + 1:
                self.ids.extend(map(int, block[at + 1 : end].split(b",")))
        except _UNREAD:
            self.unable = self.unable or "ids"
        if self._settled:
            if passed.find(_NO_DELTA) < 0:
                self._last = passed
                return passed
        else:
            self._look(passed)
        # Sent for its ids alone, where a parser gave nothing.
        if passed.find(_NO_DELTA) >= 0 and not self.complete and passed.find(b'"logprobs":null') >= 0:
            return b""
        self._last = passed
        return passed

    def _without_ids(self, block: bytes) -> bytes:
        if block.find(_PROMPT_IDS) >= 0:
            block = self._without_prompt(block)
        elif block.startswith(_DONE.rstrip()):
            self.done = True
        elif block.find(ERROR_MARK) >= 0 and not self.unable and self.ids:
            said = read_event(self.plan.path, data_of(block))
            if said.kind is Kind.ERROR:
                self.failed = said.status
                return b""
        elif block.find(b'"choices":[{') >= 0:
            if block.find(b'"role"') < 0:
                self.unable = self.unable or "ids"  # an engine that does not say them
        elif block.find(b'"usage":{') >= 0:
            self.usage_sent = True
        return block

    def _without_prompt(self, block: bytes) -> bytes:
        at = block.find(_PROMPT_IDS) + len(_PROMPT_IDS) - 1
        end = block.find(b"]", at)
        told, known = block[at + 1 : end], self._known
        self.prompt_tokens = told.count(b",") + 1 if told else 0
        # The router's own are kept anyway.
        same = known is not None and len(known) == self.prompt_tokens
        if same and told.endswith(_encoded(list((known or ())[-_DECODED_LEN:]))[1:-1]):
            self.prompt = known or ()
        else:
            self.prompt = told
        self._known = None
        return b"%bnull%b" % (block[:at], block[end + 1 :])

    def _ends_so(self, block: bytes) -> bool:
        """Whether an event with ids that says why the answer ended is no abort."""
        try:
            reasons = [one.finish_reason for one in _EVENT.decode(data_of(block) or b"").choices]
        except _UNREAD:
            self.unable = self.unable or "ids"
            return True
        ended = any(reasons) and "abort" not in reasons
        self.complete = self.complete or ended
        return ended or not any(reasons)

    def _look(self, block: bytes) -> None:
        """Note what this event says beside its ids."""
        plan = self.plan
        if len(self.ids) > _IDS_MAX:
            self.unable = "size"
        try:
            for choice in _EVENT.decode(data_of(block) or b"").choices:
                delta, text = choice.delta, choice.text or ""
                if delta is not None:
                    text = delta.content or ""
                    self._reasoned = self._reasoned or bool(delta.reasoning or delta.reasoning_content)
                    if delta.tool_calls:
                        self.unable = "tools"
                self._spoken = self._spoken or bool(text)
                self.chars += len(text)
                if plan.logprobs is not None and not plan.chat:
                    told = _LOGPROBS.decode(choice.logprobs)
                    for at, token in zip(told.text_offset, told.tokens, strict=False) if told else ():
                        self._ends.append(at + len(token))
        except _UNREAD:
            self.unable = self.unable or "ids"
        self._settled = (
            self._spoken
            and not plan.stop.stops
            and (plan.chat or plan.logprobs is None)
            and bool(self.prompt_tokens)
        )

    def check(self) -> str:
        """Why the stream cannot go on elsewhere (a label); "": it can."""
        if self.unable:
            return self.unable
        if not self.ids or not self.prompt_tokens or not self._last:
            return "ids"
        # Some requests break every engine they meet.
        if self.broken or self.aborts >= _ABORTS_MAX:
            return "broken"
        if len(self.ids) > _IDS_MAX:
            return "size"
        # What a parser takes for reasoning is only known to the engine that has it.
        if not self._spoken or (self._reasoned and self.plan.stop.stops):
            return "reasoning"
        return ""

    @property
    def movable(self) -> bool:
        """It could go on elsewhere now, and has something left to say."""
        return not self.complete and not self.check()

    def usage(self, more: int = 0) -> Usage:
        """Of the whole answer, with this many tokens behind those that are kept."""
        return Usage(self.prompt_tokens, len(self.ids) + more)

    def shape(self) -> Shape:
        """The shape of its events."""
        return Shape(self._last, self.plan)

    def closing(self) -> bytes:
        """The end of a stream that has said why it ended."""
        if self.done:
            return b""
        usage = b""
        if self.plan.wants_usage and not self.usage_sent:
            usage = self.shape().usage(self.usage())
        return usage + _DONE


class Shape:
    """Writes events like those of a stream, one of which is given."""

    def __init__(self, like: bytes, plan: ContinuationPlan) -> None:
        self._chat = plan.chat
        self._in_chunks = plan.in_chunks
        members = _MEMBERS.decode(data_of(like) or b"")
        self._choice = _CHOICES.decode(members["choices"])[0]
        for name in ("usage", "system_fingerprint", "metrics"):
            members.pop(name, None)
        at = list(members).index("choices")
        parts = [b"%b:%b" % (_encoded(name), bytes(one)) for name, one in members.items()]
        self._head = b"data: {%b," % b",".join(parts[:at])
        # Such as ``kv_transfer_params`` of vLLM 0.33.
        self._tail = b"".join([b",%b" % part for part in parts[at + 1 :]])

    def chunk(
        self,
        text: str,
        logprobs: bytes,
        ended: str | None,
        stop: bytes,
        usage: Usage,
        fingerprint: bytes = b"null",
    ) -> bytes:
        """One event with text. ``logprobs``, ``stop`` and ``fingerprint`` are JSON."""
        told = {
            "delta": b'{"content":%b}' % _encoded(text),
            "text": _encoded(text),
            "logprobs": logprobs,
            "finish_reason": _encoded(ended),
            "stop_reason": stop,
        }
        choice = {name: told.get(name, bytes(one)) for name, one in self._choice.items()}
        if ended is not None and "stop_reason" not in choice:
            # Only the last event of a chat has it, behind the reason.
            choice = {}
            for name, one in self._choice.items():
                choice[name] = told.get(name, bytes(one))
                if name == "finish_reason":
                    choice["stop_reason"] = stop
        inner = b",".join([b"%b:%b" % (_encoded(name), one) for name, one in choice.items()])
        more = b',"usage":%b' % _usage_json(usage) if self._in_chunks else b""
        if fingerprint != b"null":
            more += b',"system_fingerprint":%b' % fingerprint
        return b'%b"choices":[{%b}]%b%b}\n\n' % (self._head, inner, more, self._tail)

    def usage(self, usage: Usage, fingerprint: bytes = b"null") -> bytes:
        """The event with the usage of the answer."""
        more = b"" if fingerprint == b"null" else b',"system_fingerprint":%b' % fingerprint
        return b'%b"choices":[],"usage":%b%b}\n\n' % (self._head, _usage_json(usage), more)


def _usage_json(usage: Usage) -> bytes:
    total = usage.prompt_tokens + usage.completion_tokens
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        usage.prompt_tokens,
        total,
        usage.completion_tokens,
    )


def whole_tokens(ids: Sequence[int], decode: Decode) -> int | None:
    """How many of these tokens end with a whole character; None: not to be found out.

    vLLM primes its detokenizer with the prompt: where that ends within a character, the first text is all of
    it (vllm#48853). The client has had nothing of the tokens behind the last whole character.
    """
    for dropped in range(min(_DROPPED_MAX, len(ids)) + 1):
        end = len(ids) - dropped
        if not end or not decode(ids[max(0, end - _DECODED_LEN) : end]).endswith(UNFINISHED):
            return end
    return None


def text_so_far(kept: KeptStream, tokens: int, decode: Decode) -> Generator[None, None, StoppingText | None]:
    """The first ``tokens`` of an answer with stop strings; None: the client has had another text. In steps:
    an answer may have a million tokens."""
    prompt = kept.prompt
    known = (
        list(map(int, prompt.rsplit(b",", _CONTEXT_LEN)[-_CONTEXT_LEN:]))
        if isinstance(prompt, bytes)
        else (list(prompt[-_CONTEXT_LEN:]))
    )
    ids, pieces, start = kept.ids[:tokens], [""], 0
    while start < tokens:
        least = min(start + _STEP_LEN, tokens)
        for end in range(least, min(least + _DROPPED_MAX, tokens) + 1):
            piece = decode([*known, *ids[start:end]])
            if not piece.endswith(UNFINISHED):
                break
        before = decode(known)
        if not piece.startswith(before):
            return None
        pieces.append(piece[len(before) :])
        known, start = ids[max(start, end - _CONTEXT_LEN) : end].tolist(), end
        yield
    text, rules = "".join(pieces), kept.plan.stop
    if kept.chars != max(0, len(text) - rules.held_back):
        return None
    return StoppingText(rules, text, kept.chars, ids, decode)


def _biases(plan: ContinuationPlan, ids: Sequence[int]) -> dict[str, float] | None:
    """Biases for tokens behind these, which count for the penalty: engines count only what they generate
    themselves. None: they are beyond what engines take."""
    bias, penalty = dict(plan.logit_bias), plan.frequency_penalty
    for token, count in Counter(ids if penalty else ()).items():
        bias[str(token)] = bias.get(str(token), 0.0) - penalty * count
    return None if any(abs(bound) > _BIAS_MAX for bound in bias.values()) else bias


def completion_of(kept: KeptStream, tokens: int, context: int | None) -> bytes | str | None:
    """Body of the completion that goes on behind the first ``tokens`` of the answer. None: no token is left
    to the answer; a text: the reason why it cannot be asked for (a label). ``context``: of its engines, in
    tokens, where it is known."""
    plan, ids = kept.plan, kept.ids[:tokens]
    left = None if plan.max_tokens is None else plan.max_tokens - tokens
    if context is not None:
        room = context - kept.prompt_tokens - tokens
        left = room if left is None else min(left, room)
    if left is None:
        return "context"
    if left <= 0:
        return None
    own: dict[str, Any] = {
        "stream": True,
        # In every event: how many tokens it is made of.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": left,
        # To go on again; and, of an event with several tokens, which of them completed a stop string.
        "return_token_ids": True,
        **plan.members,
    }
    if plan.stop.min_tokens > tokens:
        own["min_tokens"] = min(plan.stop.min_tokens - tokens, left)
    if plan.seed is not None:
        # The same random numbers would come again.
        own["seed"] = min(plan.seed + tokens, _SEED_MAX)
    if plan.logprobs is not None:
        own["logprobs"] = plan.logprobs
    bias = _biases(plan, ids)
    if bias is None:
        return "penalty"
    if plan.frequency_penalty:
        own["frequency_penalty"] = plan.frequency_penalty
    if bias:
        own["logit_bias"] = bias
    return _asked_behind(kept, tokens, own)


def warming_of(kept: KeptStream, tokens: int) -> bytes:
    """Body of a completion that computes the prompt and the first ``tokens`` of the answer, and no more."""
    own = {name: one for name, one in kept.plan.members.items() if name in _OF_CACHE}
    return _asked_behind(kept, tokens, {"max_tokens": 1, **own})


def _asked_behind(kept: KeptStream, tokens: int, own: dict[str, Any]) -> bytes:
    """A completion with these members behind the first ``tokens`` of the answer."""
    prompt = kept.prompt if isinstance(kept.prompt, bytes) else _encoded(list(kept.prompt))[1:-1]
    answer = _encoded(kept.ids[:tokens].tolist())[1:-1]
    return b'{"prompt":[%b],%b' % (b",".join(filter(None, (prompt, answer))), _encoded(own)[1:])


class ContinuedStream:
    """Events of the completion that goes on, as events of the stream that broke, whose state grows with them.

    ``tokens``: those of its answer that are kept. ``stopping``: its text, where there are stop strings.
    ``told``: whether a comment says that it goes on.
    """

    def __init__(
        self, kept: KeptStream, tokens: int, stopping: StoppingText | None = None, *, told: bool = False
    ) -> None:
        self.kept = kept
        kept.failed = 0
        self._shape = kept.shape()
        self._plan = kept.plan
        self._again = max(kept.told, len(kept.ids)) - tokens
        """Tokens of which the client has had an event, but no text."""
        self.before = tokens
        self._tokens = 0
        """Generated since."""
        self._stopping = stopping
        ends = kept._ends  # noqa: SLF001  # one state in two parts
        self._offset = ends[-1 - self._again] if len(ends) > self._again else 0
        self._told = told
        self.on_begin: Callable[[], None] = lambda: None
        """Called when its engine has begun, or failed to."""
        self.on_taken: Callable[[], None] = lambda: None
        """Called when its engine has begun."""
        self.begun = self.moves = self.warmed = False
        """Its engine has begun; the one before still has the stream; its engine has computed the rest."""
        self.done = False
        """The answer is over, though its engine would go on."""

    def taken(self) -> None:
        """Its engine has begun: what the engine before had, and did not send, will not come."""
        if not self.begun:
            self.begun = True
            self.kept.told = max(self.kept.told, len(self.kept.ids))
            del self.kept.ids[self.before :]
            self.on_begin()
            self.on_taken()

    def feed(self, data: bytes) -> bytes:
        """Whole events of the engine's: those for the client."""
        out = [b": continued\n\n"] if self._told and data else []
        self._told = self._told and not data
        for block in blocks(data):
            if self.done or self.kept.failed:
                break
            out.append(self._event(block))
        return b"".join(out)

    @property
    def usage(self) -> Usage:
        """Of the whole answer; what the first engine had cached, it never said."""
        return Usage(self.kept.prompt_tokens, self.before + self._tokens)

    def over(self, reason: str = "length") -> bytes:
        """The end of an answer that has no token left."""
        text = "" if self._stopping is None else self._stopping.passed(flush=True)
        return self._end(text, b"null", reason, b"null", b"null")

    def _event(self, block: bytes) -> bytes:
        value = data_of(block)
        if value is None or value.strip() == b"[DONE]":
            self.kept.done = self.kept.done or value is not None
            return block
        try:
            event = _EVENT.decode(value)
            if not event.choices and event.usage is None:
                return self._other(block, value)
            tokens = self._came(event.usage)
            if not event.choices:
                wants = self._plan.wants_usage
                self.kept.usage_sent = self.kept.usage_sent or wants
                return self._shape.usage(self.usage, bytes(event.system_fingerprint)) if wants else b""
            return self._chunk(event.choices[0], tokens, bytes(event.system_fingerprint))
        except _UNREAD:
            return block

    def _other(self, block: bytes, value: bytes) -> bytes:
        """An error, where the answer may go on after it, is not for the client."""
        said = read_event(COMPLETION, value)
        if said.kind is Kind.ERROR and not self.kept.check():
            self.kept.failed = said.status
            return b""
        return block

    def _came(self, usage: Any) -> int:
        """Tokens of this event."""
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        before = self._tokens
        self._tokens = count if isinstance(count, int) and before <= count < _TOKENS_MAX else before + 1
        return self._tokens - before

    def _chunk(self, choice: _Choice, tokens: int, fingerprint: bytes) -> bytes:
        again = min(self._again, tokens)
        self._again -= again
        ended, stop = choice.finish_reason, bytes(choice.stop_reason)
        text = choice.text or ""
        kept, ids = self.kept, choice.token_ids or ()
        kept.ids.extend(ids)
        if len(ids) != tokens or len(kept.ids) > _IDS_MAX:
            kept.unable = kept.unable or ("size" if ids else "ids")
        kept.complete = kept.complete or ended is not None
        if self._stopping is not None:
            found = self._stopping.add(text, ids)
            if found is not None:
                self.done = True
                self._tokens -= tokens - min(found.tokens, tokens)
                logprobs, _ = self._logprobs(choice.logprobs, again, found.tokens)
                return self._end(found.text, logprobs, "stop", _encoded(found.stop), fingerprint)
            text = self._stopping.passed(flush=ended is not None)
        kept.chars += len(text)
        logprobs, entries = self._logprobs(choice.logprobs, again, tokens)
        if not text and ended is None and not entries and (again == tokens or self._parsed):
            return b""
        return self._shape.chunk(text, logprobs, ended, stop, self.usage, fingerprint)

    @property
    def _parsed(self) -> bool:
        """Whether a parser stood between the engine and the client: it gives no empty events."""
        return self.kept._reasoned  # noqa: SLF001  # one state in two parts

    def _end(self, text: str, logprobs: bytes, ended: str, stop: bytes, fingerprint: bytes) -> bytes:
        last = self._shape.chunk(text, logprobs, ended, stop, self.usage, fingerprint)
        self.kept.complete = self.kept.done = True
        return last + (self._shape.usage(self.usage) if self._plan.wants_usage else b"") + _DONE

    def _logprobs(self, raw: _Raw, start: int, end: int) -> tuple[bytes, int]:
        """Those of these tokens of an event, in the stream's shape, and their number."""
        told = _LOGPROBS.decode(raw)
        if told is None:
            return b"null", 0
        tokens, values = told.tokens[start:end], told.token_logprobs[start:end]
        tops = told.top_logprobs[start:end]
        if self._plan.chat:
            entries = zip(tokens, values, tops, strict=True)
            return b'{"content":[%b]}' % b",".join([self._entry(*one) for one in entries]), len(tokens)
        offsets = [at + self._offset for at in told.text_offset[start:end]]
        ends = map(len, tokens)
        self.kept._ends.extend(map(int.__add__, offsets, ends))  # noqa: SLF001  # one state in two parts
        shown = {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }
        return _encoded(shown), len(tokens)

    def _entry(self, token: str, value: _Raw, top: dict[str, _Raw] | None) -> bytes:
        """Of a chat: completions list the chosen token first, and one more than was asked for."""
        most = list((top or {}).items())[: self._plan.logprobs or 0]
        likely = b",".join([b"{%b}" % _likely(name, one) for name, one in most])
        return b'{%b,"top_logprobs":[%b]}' % (_likely(token, value), likely)


def _likely(token: str, value: _Raw) -> bytes:
    ids = _encoded(list(token.encode("utf-8", "replace")))
    return b'"token":%b,"logprob":%b,"bytes":%b' % (_encoded(token), bytes(value), ids)
