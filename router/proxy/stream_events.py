"""Events of streamed chats and completions, as vLLM 0.32 writes them: read, and written alike. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.continuation_plan import ContinuationPlan
from kvatlas.router.proxy.events import data_of

_Raw = msgspec.Raw
_MEMBERS: Final = msgspec.json.Decoder(dict[str, _Raw])
_encoded: Final = msgspec.json.Encoder().encode


class CallPart(msgspec.Struct, omit_defaults=True, gc=False):
    """The function of a call of a tool, or a part of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Of one call of a tool, or a part of it."""

    id: str | None = None
    type: str | None = None
    index: int
    function: CallPart | None = None


class Delta(msgspec.Struct, omit_defaults=True, gc=False):
    """Part of an answer that an event of a chat adds."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None

    @property
    def added(self) -> tuple[str, str, tuple[tuple[int, str, str], ...]]:
        """Text, reasoning, and parts of calls."""
        calls = [(one.index, one.function or CallPart()) for one in self.tool_calls or ()]
        parts = tuple([(index, part.name or "", part.arguments or "") for index, part in calls])
        return self.content or "", self.reasoning or self.reasoning_content or "", parts


class ReadAnswer:
    """State of an answer that a parser reads, as its client has had it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """Ids of the calls, in order."""
        self.latest = Delta()
        """The latest event that added anything."""
        self.events = 0
        """Events up to that one."""

    def add(self, delta: Delta, events: int) -> None:
        """Add the event of this number. Raises ``ValueError`` for calls that are in no order."""
        for call in delta.tool_calls or ():
            if call.id is not None and call.index == len(self.calls):
                self.calls.append(call.id)
            elif not 0 <= call.index < len(self.calls) or call.id not in {None, self.calls[call.index]}:
                raise ValueError("calls")
        if any(delta.added):
            self.latest, self.events = delta, events


class _Logprobs(msgspec.Struct, gc=False):
    """Of completions."""

    text_offset: list[int] = []
    token_logprobs: list[_Raw] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, _Raw] | None] = []


class StreamChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    logprobs: _Raw = _Raw(b"null")
    finish_reason: str | None = None
    stop_reason: _Raw = _Raw(b"null")
    token_ids: list[int] | None = None


class _StreamEvent(msgspec.Struct, gc=False):
    choices: list[StreamChoice] = []
    usage: Any = None
    system_fingerprint: _Raw = _Raw(b"null")


STREAM_EVENT: Final = msgspec.json.Decoder(_StreamEvent)
STREAM_LOGPROBS: Final = msgspec.json.Decoder(_Logprobs | None)
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, _Raw]])
DONE: Final = b"data: [DONE]\n\n"
UNREAD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


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
        text: str | bytes,
        logprobs: bytes,
        ended: str | None,
        stop: bytes,
        usage: Usage,
        fingerprint: bytes = b"null",
    ) -> bytes:
        """One event with text, or with a delta, which is JSON, as ``logprobs``, ``stop`` and ``fingerprint``
        are."""
        told = {
            "delta": text if isinstance(text, bytes) else b'{"content":%b}' % _encoded(text),
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
