"""The model of ``text_engine`` behind a parser of reasoning (``<t>``) and calls (``<c>name:arguments</c>``),
with vLLM's endpoints that make chat events of ids (0.32, ``--enable-scale-out``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvatlas.router.openai.apis import CHAT
from tests.support.text_engine import DONE, EOS, PROMPT, TextEngine, decode

_TAGS = ("<t>", "</t>", "<c>", "</c>")
_TAG = re.compile("|".join(_TAGS))
Read = tuple[str, str, list[tuple[str, str]]]


def read(text: str, *, finished: bool = False) -> Read:
    """Content, reasoning and calls in a text, of which what may begin a tag is held back."""
    if not finished:
        held = max((n for n in range(1, 4) if any(tag[:n] == text[-n:] for tag in _TAGS)), default=0)
        text = text[: len(text) - held] if held else text
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    mode, start = "", 0
    for match in [*_TAG.finditer(text), None]:
        part, start = text[start : match.start() if match else None], match.end() if match else 0
        if mode == "<t>":
            reasoning += part
        elif mode == "<c>":
            name, colon, arguments = part.partition(":")
            if colon:
                calls.append((name, arguments))
        else:
            content += part
        mode = match[0] if match else ""
    return content, reasoning, calls


def delta(before: Read, after: Read, number: int = 0) -> dict[str, Any]:
    """The part of ``after`` that ``before`` has not. ``number``: in the ids of new calls."""
    calls = []
    for index, (name, arguments) in enumerate(after[2]):
        new = index >= len(before[2])
        more = arguments if new else arguments[len(before[2][index][1]) :]
        if new or more:
            part: dict[str, Any] = {"index": index, "function": {"arguments": more}}
            if new:
                part = {"id": f"call-{number}-{index}", "type": "function", **part}
                part["function"]["name"] = name
            calls.append(part)
    found = {
        "content": after[0][len(before[0]) :],
        "reasoning": after[1][len(before[1]) :],
        "tool_calls": calls,
    }
    return {name: one for name, one in found.items() if one}


class ParserEngine(TextEngine):
    """An engine that calls tools."""

    def __init__(self, answer: Sequence[int], chunk: int = 1) -> None:
        super().__init__(answer, chunk)
        self.rendered: dict[str, Any] = {}
        """Sampling parameters of its own for chats."""
        self.parses = True

    def chat(self, body: dict[str, Any]) -> Iterator[bytes]:
        """The events of a chat."""
        head = {"id": "one", "object": "chat.completion.chunk", "created": 5, "model": "m"}
        asks = body.get("return_token_ids")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        told = {"prompt_token_ids": PROMPT if asks else None, "prompt_text": None}
        yield self.event({**head, "choices": [{**first, "finish_reason": None}], **told})
        before = read("")
        for start in range(0, len(self.answer), self.chunk):
            ids = self.answer[start : start + self.chunk]
            ended = ids[-1] == EOS
            after = read(whole_text(self.answer[: start + len(ids)]), finished=ended)
            more = delta(before, after)
            if more or asks or ended:
                choice = {"index": 0, "delta": more, "logprobs": None, "finish_reason": None}
                if ended:
                    choice |= {"finish_reason": "tool_calls" if after[2] else "stop", "stop_reason": None}
                choice["token_ids"] = ids if asks else None
                yield self.event({**head, "choices": [choice]})
            before = after
        if body.get("stream_options", {}).get("include_usage"):
            yield self.event({**head, "choices": [], "usage": self._usage(PROMPT, len(self.answer))})
        yield DONE

    def answers(self, path: str, body: dict[str, Any]) -> bytes:
        """Its answers about the ids of chats."""
        if path == CHAT + "/render":
            sampling = {"temperature": 0.0, "stop_token_ids": [], **self.rendered}
            return json.dumps({"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling}).encode()
        assert path == CHAT + "/derender"
        assert body["stream"]
        assert body["prompt_token_ids"] == PROMPT
        assert body["chat_request"]["messages"]
        state, (choice,) = body["stream_state"] or {}, body["generate_chunk"]["choices"]
        so_far = state.get("output_token_ids", [])
        assert sum(state.get("output_chunk_lens", [])) == len(so_far)
        ids = [*so_far, *choice["token_ids"]]
        assert EOS not in ids
        ended = choice["finish_reason"]
        more = delta(read(decode_whole(so_far)), read(decode_whole(ids), finished=ended is not None), 7)
        for call in more.get("tool_calls", ()):
            if "id" in call and call["index"] < len(state["last_tool_call_ids"]):
                call["id"] = state["last_tool_call_ids"][call["index"]]
        empty = {"role": None, "content": None, "reasoning": None}
        shown = {"index": 0, "delta": {**empty, **more}, "finish_reason": ended}
        state = {**state, "output_token_ids": ids if self.parses else []}
        return json.dumps({"chunk": {"choices": [shown]}, "stream_state": state}).encode()


def decode_whole(ids: Sequence[int]) -> str:
    """The text of whole characters."""
    return decode(ids).rstrip("\ufffd")


def whole_text(ids: Sequence[int]) -> str:
    return decode_whole([one for one in ids if one != EOS])
