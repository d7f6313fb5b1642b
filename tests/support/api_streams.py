"""One short event stream of each API, in its parts, as engines write them; and other framings of the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES

Json = dict[str, Any]
SGLANG = "/generate"
"""SGLang's own API, which operators may pass on."""


class ApiStream(msgspec.Struct, frozen=True):
    """Events as (name, data); "": they have no name."""

    body: Json
    """A request for it."""
    openings: tuple[tuple[str, Json], ...]
    """Events before the first token, and empty ones."""
    token: tuple[str, Json]
    end: tuple[tuple[str, Json | None], ...]
    """None: ``[DONE]``."""
    abort: tuple[str, Json]
    error: tuple[str, Json]


def _chunk(kind: str, *choices: Json, **more: Any) -> Json:
    return {"id": "x", "object": kind, "created": 1, "model": "m", "choices": list(choices), **more}


def _chat(delta: Json, reason: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
    return _chunk("chat.completion.chunk", choice)


def _text(text: str, reason: str | None = None) -> Json:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    return _chunk("text_completion", choice)


def _ids(ids: list[int], reason: str | None = None) -> Json:
    choice = {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": ids}
    return {"request_id": "x", "choices": [choice], "prompt_logprobs": None}


def _response(name: str, number: int, **more: Any) -> tuple[str, Json]:
    return name, {"type": name, "sequence_number": number, **more}


def _held(status: str, output_tokens: int | None, error: Any = None) -> Json:
    usage = None if output_tokens is None else {"input_tokens": 5, "output_tokens": output_tokens}
    return {
        "id": "resp_x",
        "object": "response",
        "status": status,
        "error": error,
        "usage": usage,
        "output": [],
    }


def _message(kind: str, **more: Any) -> tuple[str, Json]:
    return kind, {"type": kind, **more}


def _native(text: str, reason: Json | None = None) -> Json:
    meta = {"id": "x", "finish_reason": reason, "prompt_tokens": 5, "completion_tokens": len(text)}
    return {"text": text, "output_ids": [7] * len(text), "meta_info": meta}


_FAILED = {
    "message": "EngineCore encountered an issue.",
    "type": "Internal Server Error",
    "param": None,
    "code": 500,
}
_PLACE = {"item_id": "msg_x", "output_index": 0, "content_index": 0}
_START = {
    "id": "x",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 0},
}
STREAMS: dict[str, ApiStream] = {
    CHAT: ApiStream(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        (
            ("", _chunk("chat.completion.chunk")),
            ("", {**_chat({"role": "assistant", "content": ""}), "prompt_token_ids": [5] * 9}),
            ("", _chat({"content": ""})),
            ("", _chat({})),
            ("", _chat({"role": "assistant", "content": None, "tool_calls": [], "reasoning": None})),
        ),
        ("", _chat({"content": "SECRET"})),
        (("", _chat({}, "stop")), ("", None)),
        ("", _chat({"content": "x"}, "abort")),
        ("", {"error": _FAILED}),
    ),
    COMPLETION: ApiStream(
        {"model": "m", "prompt": "hi"},
        (("", _chunk("text_completion")), ("", _text(""))),
        ("", _text("SECRET")),
        (("", _text("", "stop")), ("", None)),
        ("", _text("x", "abort")),
        ("", {"error": _FAILED}),
    ),
    GENERATE: ApiStream(
        {"model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 6}},
        (("", {"request_id": "x", "choices": []}), ("", _ids([]))),
        ("", {**_ids([7]), "note": "SECRET"}),
        (("", _ids([8], "stop")), ("", None)),
        ("", _ids([9], "abort")),
        ("", {"error": _FAILED}),
    ),
    MESSAGES: ApiStream(
        {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]},
        (
            _message("message_start", message=_START),
            _message("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            _message("ping"),
            _message("content_block_delta", index=0, delta={"type": "text_delta", "text": ""}),
        ),
        _message("content_block_delta", index=0, delta={"type": "text_delta", "text": "SECRET"}),
        (
            _message("content_block_stop", index=0),
            _message("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
            _message("message_stop"),
        ),
        _message("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 1}),
        _message("error", error={"type": "api_error", "message": "EngineCore encountered an issue."}),
    ),
    RESPONSES: ApiStream(
        {"model": "m", "input": "hi", "store": False},
        (
            _response("response.created", 0, response=_held("in_progress", None)),
            _response("response.in_progress", 1, response=_held("in_progress", None)),
            _response("response.output_item.added", 2, item={"type": "message", "id": "m", "content": []}),
            _response("response.content_part.added", 3, part={"type": "output_text", "text": ""}),
            _response("response.output_text.delta", 4, delta="", logprobs=[], **_PLACE),
        ),
        _response("response.output_text.delta", 5, delta="SECRET", logprobs=[], **_PLACE),
        (_response("response.completed", 6, response=_held("completed", 1)),),
        _response("response.completed", 6, response=_held("completed", 0)),
        _response(
            "response.failed", 6, response=_held("failed", None, {"code": "server_error", "message": "x"})
        ),
    ),
    SGLANG: ApiStream(
        {"text": "hi"},
        (("", _native("")),),
        ("", _native("SECRET")),
        (("", _native("SECRET.", {"type": "stop", "matched": 2})), ("", None)),
        ("", _native("SECRET.", {"type": "abort", "message": "Aborted", "status_code": None})),
        ("", {"error": {**_FAILED, "object": "error"}}),
    ),
}
LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}


def event_of(
    named: tuple[str, Json | None], end: bytes = b"\n", *, lines: bool = False, space: str = ""
) -> bytes:
    """One event with these line ends; ``lines``: its data on several lines, ``space``: behind colons and
    commas of its data."""
    name, data = named
    if data is None:
        text = "[DONE]"
    else:
        text = json.dumps(data, separators=("," + space, ":" + space))
        text = text.replace('{"', '{\n"') if lines else text
    head = b"event: %b%b" % (name.encode(), end) if name else b""
    rows = [b"data: %b%b" % (row.encode(), end) for row in text.split("\n")]
    return head + b"".join(rows) + end


def stream_of(path: str, *, end: bytes = b"\n", lines: bool = False, space: str = "") -> bytes:
    """The whole stream of an API: openings, one token, its end."""
    parts = STREAMS[path]
    named = (*parts.openings, parts.token, *parts.end)
    return b"".join(event_of(one, end, lines=lines, space=space) for one in named)


def data_of_events(body: bytes) -> list[Json]:
    """The JSON data of each event that a client of this stream gets, by the standard's rules."""
    found: list[Json] = []
    lines: list[bytes] = []
    for line in [*body.splitlines(), b""]:
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
        elif not line and lines:
            text = b"\n".join(lines)
            lines = []
            if text.strip() not in (b"", b"[DONE]"):
                found.append(json.loads(text))
    return found
