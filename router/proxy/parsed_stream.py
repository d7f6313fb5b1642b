"""A chat whose tokens a parser reads (reasoning, calls of tools) goes on from another engine.

That engine generates ids, as for any stream that goes on, and makes events of them
(``POST /v1/chat/completions/derender``): from the chat's body and the ids so far, in the steps in which the
parser before had them, so that it is where that one was. First it must show that it reads the answer so far
as the client has had it, and that nothing but the prompt decides on the next token (vLLM 0.32:
renderers/online_derenderer.py, entrypoints/scale_out, with ``--enable-scale-out``).
Invariant: ids count as the answer's once the client has the event made of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.proxy.continuation import ContinuedStream
from kvatlas.router.proxy.failures import EventRefusedError
from kvatlas.router.proxy.kept_stream import IDS_MAX, KeptStream
from kvatlas.router.proxy.stream_events import UNREAD, Delta, StreamChoice

DERENDER: Final = CHAT + "/derender"
RENDER: Final = CHAT + "/render"
ABSENT: Final = frozenset({403, 404, 405, 501})
"""Statuses of an engine that was started without these endpoints."""
Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Ask the engine at a path. Raises ``UpstreamError``, and ``EventRefusedError`` where it refuses."""
# The engine reads the whole answer again in each step. From this length on a step is a part of the answer, so
# that some 32 times its length are read in all.
_EACH_LEN: Final = 256
_STEP_PARTS: Final = 32
_encoded: Final = msgspec.json.Encoder().encode
_BROKEN: Final = 502


async def _not_asked(path: str, body: bytes) -> bytes:
    raise UpstreamError("broken_stream")


class _Sampling(msgspec.Struct, gc=False):
    structured_outputs: Any = None
    stop_token_ids: list[int] = []


class _Rendered(msgspec.Struct, gc=False):
    token_ids: list[int]
    sampling_params: _Sampling


class _Choice(msgspec.Struct, gc=False):
    delta: Delta


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice]


class _State(msgspec.Struct, gc=False):
    output_token_ids: list[int] = []


class _Derendered(msgspec.Struct, gc=False):
    chunk: _Chunk
    stream_state: _State


_RENDERED: Final = msgspec.json.Decoder(_Rendered)
_DERENDERED: Final = msgspec.json.Decoder(_Derendered)
_STOP_IDS: Final = msgspec.json.Decoder(list[int])


class ParsedStream(ContinuedStream):
    """As ``ContinuedStream``, with ``parsed`` to be awaited as long as it is ``due``."""

    def __init__(self, kept: KeptStream, *, told: bool = False) -> None:
        super().__init__(kept, len(kept.ids), told=told)
        self._prompt = kept.prompt if isinstance(kept.prompt, bytes) else _encoded(list(kept.prompt))[1:-1]
        self._pending: list[list[int]] = []
        """Tokens of each event that has come."""
        self._last: tuple[StreamChoice, bytes] | None = None
        """The choice that ends the answer, and the fingerprint beside it."""
        self._behind: list[bytes] = []
        """Events for the client, behind those that are pending."""
        self.ask: Ask = _not_asked
        """Asks its engine, once that has shown how it reads the answer (``differs``)."""

    async def differs(self, ask: Ask) -> str:
        """Why its engine may not go on (a label); "": it may. Raises as ``ask`` does."""
        kept = self.kept
        events = kept.read.events - 1
        if events < 0 or sum(kept.lens) != len(kept.ids):
            return "reasoning"
        start = sum(kept.lens[:events])
        ids = kept.ids[start : start + kept.lens[events]].tolist()
        try:
            rendered = _RENDERED.decode(await ask(RENDER, kept.plan.body))
            asked = self._asked(start, events, kept.read.calls, ids, None)
            read = _DERENDERED.decode(await ask(DERENDER, asked))
            wanted = _STOP_IDS.decode(kept.plan.members.get("stop_token_ids", b"[]"))
        except UNREAD:
            return "parser"
        if rendered.sampling_params.structured_outputs is not None:
            return "format"  # its grammar would begin with the rest
        same = (
            _encoded(rendered.token_ids)[1:-1] == self._prompt
            and sorted(rendered.sampling_params.stop_token_ids) == sorted(wanted)
            # An engine without a parser keeps no ids.
            and len(read.stream_state.output_token_ids) == start + len(ids)
            and [one.delta.added for one in read.chunk.choices] == [kept.read.latest.added]
        )
        self.ask = ask
        return "" if same else "parser"

    @property
    def due(self) -> bool:
        """Whether events are to be made of what has come."""
        return self._last is not None or sum(map(len, self._pending)) >= self._step

    @property
    def _step(self) -> int:
        """Tokens of one step: those of one event, or more where an engine has much to read again."""
        length = len(self.kept.ids)
        return max(1, length // _STEP_PARTS) if length >= _EACH_LEN else 1

    def feed(self, data: bytes) -> bytes:
        """Take whole events of the engine's; those for the client come from ``parsed``."""
        out = super().feed(data)
        if self._pending or self._last is not None:
            self._behind.append(out)
            return b""
        return out

    async def parsed(self) -> bytes:
        """The next events for the client. Where none can be made, the stream has failed."""
        kept, step, count, tokens = self.kept, self._step, 0, 0
        while count < len(self._pending) and tokens < step:
            tokens += len(self._pending[count])
            count += 1
        ids = [one for event in self._pending[:count] for one in event]
        over = self._last is not None and count == len(self._pending)
        try:
            event, delta = await self._event_of(ids, self._last if over else None)
            kept.ids.extend(ids)
            if ids:
                kept.lens.append(len(ids))
            kept.gave(event, delta)
        except (UpstreamError, EventRefusedError, *UNREAD):
            kept.failed = _BROKEN
            return b""
        del self._pending[:count]
        if over:
            kept.complete, self._last = True, None
        if not self._pending:
            event += b"".join(self._behind)
            self._behind.clear()
        return event

    async def _event_of(self, ids: list[int], last: tuple[StreamChoice, bytes] | None) -> tuple[bytes, Delta]:
        """The event for the client that these tokens make, and what it adds; ``last``: as of ``_last``, if
        they are the answer's last ones. Raises as ``ask`` does, and errors of ``UNREAD``."""
        kept, ended, stop, fingerprint, shown = self.kept, None, b"null", b"null", ids
        if last is not None:
            choice, fingerprint = last
            ended, stop = choice.finish_reason, bytes(choice.stop_reason)
            if ended == "stop" and not kept.plan.stop.included:
                shown = ids[:-1]  # engines give no text of the token that ends an answer
        asked = self._asked(len(kept.ids), len(kept.lens), kept.read.calls, shown, ended)
        (read,) = _DERENDERED.decode(await self.ask(DERENDER, asked)).chunk.choices
        delta = read.delta
        delta.tool_calls = delta.tool_calls or None
        if ended == "stop" and (kept.read.calls or delta.tool_calls):
            ended = "tool_calls"
        if ended is None and not any(delta.added):
            return b"", delta
        return self._shape.chunk(
            _encoded(delta), b"null", ended, stop, kept.usage(len(ids)), fingerprint
        ), delta

    def _asked(self, tokens: int, events: int, calls: list[str], ids: list[int], ended: str | None) -> bytes:
        """A question to an engine: ``ids`` read behind the first ``tokens`` of the answer, which came in this
        number of ``events``."""
        kept = self.kept
        state = {
            "role_sent": True,
            "output_token_ids": kept.ids[:tokens].tolist(),
            "output_chunk_lens": kept.lens[:events].tolist(),
            "last_tool_call_ids": calls,
        }
        chunk = {
            "request_id": "",
            "choices": [{"index": 0, "token_ids": ids, "finish_reason": ended}],
        }
        return (
            b'{"stream":true,"prompt_token_ids":[%b],"stream_state":%b,"generate_chunk":%b,"chat_request":%b}'
            % (
                self._prompt,
                _encoded(state),
                _encoded(chunk),
                kept.plan.body,
            )
        )

    def _take_over(self) -> None:
        """A parser reads on."""

    def _chunk(self, choice: StreamChoice, tokens: int, fingerprint: bytes) -> bytes:
        ids = choice.token_ids or []
        if ids:
            self._pending.append(ids)
        if len(ids) != tokens or len(self.kept.ids) > IDS_MAX:
            self.kept.unable = self.kept.unable or ("size" if ids else "ids")
        if choice.finish_reason is not None:
            self._last = choice, fingerprint
        return b""
