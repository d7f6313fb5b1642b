"""A stream that breaks goes on from another engine, unseen: what is asked, and how it reads.

What is kept of it says the ids of its tokens (``KeptStream``). After a break another engine is asked for a
completion whose prompt is the ids of the prompt and of the answer so far, and its events become events of the
first stream (``ContinuedStream``).
Shapes and rules are those of vLLM 0.32 (entrypoints/openai/*/serving.py, v1/engine/detokenizer.py).

Invariant: a stream that has said why it ended is only closed. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.continuation_plan import SEED_MAX, TOKENS_MAX, ContinuationPlan
from kvatlas.router.proxy.events import Kind, blocks, data_of, read_event
from kvatlas.router.proxy.kept_stream import DECODED_LEN, DROPPED_MAX, IDS_MAX, KeptStream
from kvatlas.router.proxy.stop_strings import UNFINISHED, Decode, StoppingText
from kvatlas.router.proxy.stream_events import DONE, STREAM_EVENT, STREAM_LOGPROBS, UNREAD, StreamChoice

_Raw = msgspec.Raw
_encoded: Final = msgspec.json.Encoder().encode

# What the cache of the prompt depends on, and the engine's order.
_OF_CACHE: Final = frozenset({"model", "cache_salt", "priority", "session_id", "user"})
# vLLM bounds the biases that it takes.
_BIAS_MAX: Final = 100.0
# Of the prompt: how the first text of an answer reads may depend on it.
_CONTEXT_LEN: Final = 8
# Of the latest text; its tokens are fewer.
_COMPARED_CHARS: Final = 24
_COMPARED_LEN: Final = 128
# Tokens decoded in one step: 0.4 ms.
_STEP_LEN: Final = 4096


def whole_tokens(ids: Sequence[int], decode: Decode) -> int | None:
    """How many of these tokens end with a whole character; None: not to be found out.

    vLLM primes its detokenizer with the prompt: where that ends within a character, the first text is all of
    it (vllm#48853). The client has had nothing of the tokens behind the last whole character.
    """
    for dropped in range(min(DROPPED_MAX, len(ids)) + 1):
        end = len(ids) - dropped
        if not end or not decode(ids[max(0, end - DECODED_LEN) : end]).endswith(UNFINISHED):
            return end
    return None


def _prompt_end(kept: KeptStream) -> list[int]:
    prompt = kept.prompt
    if isinstance(prompt, bytes):
        return list(map(int, prompt.rsplit(b",", _CONTEXT_LEN)[-_CONTEXT_LEN:]))
    return list(prompt[-_CONTEXT_LEN:])


def held_back(kept: KeptStream, tokens: int, decode: Decode) -> bool:
    """Whether text of these tokens may be missing at the end of what the client has had of a chat: parsers
    wait where a mark may begin, as ``<`` does, and a completion would begin behind it."""
    if kept.plan.stop.stops:
        return False  # all of the text is compared
    text = kept.latest_text()[-_COMPARED_CHARS:]
    start = max(0, tokens - _COMPARED_LEN)
    before = [] if start else _prompt_end(kept)
    return not decode([*before, *kept.ids[start:tokens]]).endswith(text)


def text_so_far(kept: KeptStream, tokens: int, decode: Decode) -> Generator[None, None, StoppingText | None]:
    """The first ``tokens`` of an answer with stop strings; None: the client has had another text. In steps:
    an answer may have a million tokens."""
    known = _prompt_end(kept)
    ids, pieces, start = kept.ids[:tokens], [""], 0
    while start < tokens:
        least = min(start + _STEP_LEN, tokens)
        for end in range(least, min(least + DROPPED_MAX, tokens) + 1):
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
        own["seed"] = min(plan.seed + tokens, SEED_MAX)
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
        ends = kept.ends
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
            self._take_over()
            self.kept.told = max(self.kept.told, len(self.kept.ids))
            del self.kept.ids[self.before :]
            self.on_begin()
            self.on_taken()

    def _take_over(self) -> None:
        self.kept.goes_on()

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

    def over(self) -> bytes:
        """The end of an answer that has no token left."""
        text = "" if self._stopping is None else self._stopping.passed(flush=True)
        return self._end(text, b"null", "length", b"null", b"null")

    def _event(self, block: bytes) -> bytes:
        value = data_of(block)
        if value is None or value.strip() == b"[DONE]":
            self.kept.done = self.kept.done or value is not None
            return block
        try:
            event = STREAM_EVENT.decode(value)
            if not event.choices and event.usage is None:
                return self._other(block, value)
            tokens = self._came(event.usage)
            if not event.choices:
                wants = self._plan.wants_usage
                self.kept.usage_sent = self.kept.usage_sent or wants
                return self._shape.usage(self.usage, bytes(event.system_fingerprint)) if wants else b""
            return self._chunk(event.choices[0], tokens, bytes(event.system_fingerprint))
        except UNREAD:
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
        self._tokens = count if isinstance(count, int) and before <= count < TOKENS_MAX else before + 1
        return self._tokens - before

    def _chunk(self, choice: StreamChoice, tokens: int, fingerprint: bytes) -> bytes:
        again = min(self._again, tokens)
        self._again -= again
        ended, stop = choice.finish_reason, bytes(choice.stop_reason)
        text = choice.text or ""
        kept, ids = self.kept, choice.token_ids or ()
        kept.ids.extend(ids)
        if len(ids) != tokens or len(kept.ids) > IDS_MAX:
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
        return self.kept.reasoned

    def _end(self, text: str, logprobs: bytes, ended: str, stop: bytes, fingerprint: bytes) -> bytes:
        last = self._shape.chunk(text, logprobs, ended, stop, self.usage, fingerprint)
        self.kept.complete = self.kept.done = True
        return last + (self._shape.usage(self.usage) if self._plan.wants_usage else b"") + DONE

    def _logprobs(self, raw: _Raw, start: int, end: int) -> tuple[bytes, int]:
        """Those of these tokens of an event, in the stream's shape, and their number."""
        told = STREAM_LOGPROBS.decode(raw)
        if told is None:
            return b"null", 0
        tokens, values = told.tokens[start:end], told.token_logprobs[start:end]
        tops = told.top_logprobs[start:end]
        if self._plan.chat:
            entries = zip(tokens, values, tops, strict=True)
            return b'{"content":[%b]}' % b",".join([self._entry(*one) for one in entries]), len(tokens)
        offsets = [at + self._offset for at in told.text_offset[start:end]]
        ends = map(len, tokens)
        self.kept.ends.extend(map(int.__add__, offsets, ends))
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
