"""A stream on its way to the client, and what is kept of it so that it may go on from another engine.

While a stream passes, the engine says the ids of its tokens (``return_token_ids``), which are kept and taken
out again. Invariant: ids of an event that the client does not get are not kept. Pure.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.continuation_plan import ContinuationPlan
from kvatlas.router.proxy.events import ERROR_MARK, Kind, blocks, data_of, last_event_end, read_event
from kvatlas.router.proxy.stream_events import (
    DONE,
    STREAM_EVENT,
    STREAM_LOGPROBS,
    UNREAD,
    Delta,
    ReadAnswer,
    Shape,
)

_encoded: Final = msgspec.json.Encoder().encode
# Engines are stopped one after another: more often than this something else ends the answers.
_ABORTS_MAX: Final = 16
# Ids kept of an answer: 4 MB.
IDS_MAX: Final = 1 << 20
# An unfinished event may hold the ids of a whole prompt.
_EVENT_BYTES_MAX: Final = 32 << 20
# Tokens of one character that may be missing its end (measured: up to 8).
DROPPED_MAX: Final = 8
DECODED_LEN: Final = 64
# In a string, their quotes would be escaped.
_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_GOES_ON: Final = b'"finish_reason":null'
_NO_DELTA: Final = b'"delta":{}'
# Events whose text is compared with that of the tokens.
_LATEST_LEN: Final = 8
# Of an event with one token, before its id.
_MARKS: Final = (
    b'"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[',
    b'"finish_reason":null,"token_ids":[',
)
_EMPTY: Final = b'"delta":{},"logprobs":null,'
_LINE_ENDS: Final = 2
_EVENT_ENDS: Final = b"}\n\n"


class KeptStream:
    """A stream on its way to the client: what is kept of it, and its events without the ids.

    ``known``: the ids of the prompt, where the router has them. ``feed`` gives whole events.
    """

    __slots__ = (
        "_known",
        "_last",
        "_latest",
        "_mark",
        "_partial",
        "_seen",
        "_settled",
        "_spoken",
        "aborts",
        "broken",
        "chars",
        "complete",
        "done",
        "ends",
        "failed",
        "ids",
        "lens",
        "plan",
        "prompt",
        "prompt_tokens",
        "read",
        "reasoned",
        "told",
        "unable",
        "usage_sent",
    )

    def __init__(self, plan: ContinuationPlan, known: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.ids: array[int] = array("I")
        """Of the answer's tokens."""
        self.lens: array[int] = array("I")
        """Tokens of each event, as long as a parser stands between them and the client (``parsed``)."""
        self.read = ReadAnswer()
        """The answer so far, as long as a parser reads it."""
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
        self._latest: deque[bytes] = deque(maxlen=_LATEST_LEN)
        """The latest events that the client has had."""
        self._spoken = not plan.chat
        self.reasoned = False
        self.ends: deque[int] = deque(maxlen=DROPPED_MAX + 1)
        """Of the latest tokens in the text, for ``text_offset``."""
        # Later events need no look at what they say.
        self._settled = False

    def feed(self, data: bytes) -> bytes:
        """The whole events in what came, without ids; what has come of another one waits for its end."""
        if self._settled and data.endswith(_EVENT_ENDS) and not self._partial:
            # By far the most pieces are one event with one token.
            at = data.rfind(self._mark)
            if at >= 0 and data.find(b"\n") == len(data) - _LINE_ENDS and not data.endswith(_EMPTY, 0, at):
                at += len(self._mark)
                end = data.find(b"]", at)
                try:
                    self.ids.append(int(data[at:end]))
                except UNREAD:
                    pass  # several, or none
                else:
                    passed = b"%bnull%b" % (data[: at - 1], data[end + 1 :])
                    self._latest.append(passed)
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
                ids = list(map(int, block[at + 1 : end].split(b",")))
                self.ids.extend(ids)
                if not self._settled:
                    self.lens.append(len(ids))
        except UNREAD:
            self.unable = self.unable or "ids"
        if self._settled:
            if passed.find(_NO_DELTA) < 0:
                self._latest.append(passed)
                return passed
        else:
            self._look(passed)
        self._last = passed
        # Sent for its ids alone, where a parser gave nothing.
        if passed.find(_NO_DELTA) >= 0 and not self.complete and passed.find(b'"logprobs":null') >= 0:
            return b""
        self._latest.append(passed)
        return passed

    def _without_ids(self, block: bytes) -> bytes:
        if block.find(_PROMPT_IDS) >= 0:
            block = self._without_prompt(block)
        elif block.startswith(DONE.rstrip()):
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
        if same and told.endswith(_encoded(list((known or ())[-DECODED_LEN:]))[1:-1]):
            self.prompt = known or ()
        else:
            self.prompt = told
        self._known = None
        return b"%bnull%b" % (block[:at], block[end + 1 :])

    def _ends_so(self, block: bytes) -> bool:
        """Whether an event with ids that says why the answer ended is no abort."""
        try:
            reasons = [one.finish_reason for one in STREAM_EVENT.decode(data_of(block) or b"").choices]
        except UNREAD:
            self.unable = self.unable or "ids"
            return True
        ended = any(reasons) and "abort" not in reasons
        self.complete = self.complete or ended
        return ended or not any(reasons)

    def _look(self, block: bytes) -> None:
        """Note what this event says beside its ids."""
        plan = self.plan
        if len(self.ids) > IDS_MAX:
            self.unable = "size"
        try:
            for choice in STREAM_EVENT.decode(data_of(block) or b"").choices:
                delta, text = choice.delta, choice.text or ""
                if delta is not None:
                    text = delta.content or ""
                    self.reasoned = self.reasoned or bool(delta.reasoning or delta.reasoning_content)
                    if plan.parses:
                        self.read.add(delta, len(self.lens))
                    elif delta.tool_calls:
                        self.unable = "tools"
                self._spoken = self._spoken or bool(text)
                self.chars += len(text)
                if plan.logprobs is not None and not plan.chat:
                    told = STREAM_LOGPROBS.decode(choice.logprobs)
                    for at, token in zip(told.text_offset, told.tokens, strict=False) if told else ():
                        self.ends.append(at + len(token))
        except UNREAD:
            self.unable = self.unable or "ids"
        self._settled = (
            self._spoken
            and not plan.tools
            and not plan.stop.stops
            and (plan.chat or plan.logprobs is None)
            and bool(self.prompt_tokens)
        )

    def check(self) -> str:
        """Why the stream cannot go on elsewhere (a label); "": it can."""
        if self.unable:
            return self.unable
        if not self.ids or not self.prompt_tokens or not (self._last or self._latest):
            return "ids"
        # Some requests break every engine they meet.
        if self.broken or self.aborts >= _ABORTS_MAX:
            return "broken"
        if len(self.ids) > IDS_MAX:
            return "size"
        # What a parser takes for reasoning is only known to the engine that has it.
        read, stops = self.parsed, self.plan.stop.stops
        if (read and not self.plan.parses) or (stops and (read or self.reasoned)):
            return "reasoning"
        if read and self.plan.logprobs is not None:
            return "reasoning"
        return "tools" if self.read.calls and not self.plan.tools else ""

    @property
    def parsed(self) -> bool:
        """The rest of its tokens is for a parser: they may be reasoning, or calls of tools."""
        return self.plan.tools or not self._spoken

    def gave(self, block: bytes, delta: Delta) -> None:
        """Note an event that the client gets of tokens that another engine's parser has read."""
        self.read.add(delta, len(self.lens))
        self._spoken = self._spoken or bool(delta.content)
        if block:
            self._latest.append(block)

    def goes_on(self) -> None:
        """Note that no parser reads what comes from now on."""
        if self._latest:
            self._last = self._latest[-1]
        self._latest.clear()

    def latest_text(self) -> str:
        """The content of the latest events of a chat, or nothing where it is not known. A parser may hold
        back text of tokens that follow it."""
        text = []
        for block in self._latest if self.plan.chat else ():
            try:
                choices = STREAM_EVENT.decode(data_of(block) or b"").choices
            except UNREAD:
                return ""
            text += [one.delta.content or "" for one in choices if one.delta is not None]
        return "".join(text)

    @property
    def movable(self) -> bool:
        """It could go on elsewhere now, and has something left to say."""
        return not self.complete and not self.check()

    def usage(self, more: int = 0) -> Usage:
        """Of the whole answer, with this many tokens behind those that are kept."""
        return Usage(self.prompt_tokens, len(self.ids) + more)

    def shape(self) -> Shape:
        """The shape of its events."""
        return Shape(self._latest[-1] if self._latest else self._last, self.plan)

    def closing(self) -> bytes:
        """The end of a stream that has said why it ended."""
        if self.done:
            return b""
        usage = b""
        if self.plan.wants_usage and not self.usage_sent:
            usage = self.shape().usage(self.usage())
        return usage + DONE
