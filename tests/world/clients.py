"""Clients: bodies by API, one HTTP exchange written byte by byte, and what its answer says.

Nothing here knows what is right; ``oracles`` judge. A client's machine, its patience and its manners come
from the plan.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec

from tests.world.fleet import on
from tests.world.plan import OPENAI, ClientRequest

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "tokens": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
PATIENCE_S = 200.0
"""Longer than any time-out that a fault may justify, and short of the router's own for a first byte."""
_PAUSE_S = 0.2
_TOKEN_IDS = range(3, 250)
_END = b"\r\n\r\n"


class Answer(msgspec.Struct):
    """Observation of a client. ``end``: complete, cut, left, refused or silent."""

    status: int = 0
    head: dict[str, str] = {}
    body: bytes = b""
    end: str = "silent"
    more: bytes = b""
    """Bytes after the answer's end."""


class Exchange(msgspec.Struct):
    """One request and its answer. Times are of the loop."""

    request: ClientRequest
    request_id: str
    path: str
    body: bytes
    began_s: float
    ended_s: float = 0.0
    answer: Answer = msgspec.field(default_factory=Answer)
    quiet: bool = False
    """Sent one by one, after all faults."""

    @property
    def engine(self) -> str:
        return self.answer.head.get("x-kvatlas-engine", "")


class Told(msgspec.Struct):
    """Meaning of an answer's body."""

    text: str = ""
    """Of the first choice."""
    choices: int = 1
    reason: str = ""
    """``length`` or ``stop``, another finish reason, or "" for none."""
    whole: bool = False
    """The answer has its end."""
    error: str = ""
    """Message of an error event."""
    names: set[str] = set()
    """Ids of a stream's events."""
    roles: int = 0
    """Events that begin a message."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


def sentence(story: int) -> str:
    return f"story {story} of a router and a garden "


def body_of(request: ClientRequest, turn: int, earlier: list[dict[str, str]]) -> dict[str, Any]:
    """The JSON body of one turn; ``earlier``: the messages before it."""
    limit = "max_output_tokens" if request.api == "responses" else "max_tokens"
    body: dict[str, Any] = {"model": request.model, limit: request.answer_tokens}
    asked = earlier or [{"role": "user", "content": sentence(request.story) * request.length}]
    if request.api in {"chat", "messages"}:
        body["messages"] = asked
    elif request.api == "responses":
        body |= {"input": asked, "store": False}
    elif request.api == "completions":
        body["prompt"] = "\n".join(message["content"] for message in asked)
    else:
        prompts = [_token_ids(request, which, turn) for which in range(request.prompts)]
        body["prompt"] = prompts if request.prompts > 1 else prompts[0]
    if request.answers > 1:
        body["n"] = request.answers
    if request.stream:
        body["stream"] = True
        if request.usage and request.api in OPENAI:
            body["stream_options"] = {"include_usage": True}
    if request.padding_bytes:
        body["metadata"] = {"x": "y" * request.padding_bytes}
    return {**body, **request.body}


def _token_ids(request: ClientRequest, which: int, turn: int) -> list[int]:
    draw = random.Random((request.story + which) * 31 + request.length)
    return [draw.choice(_TOKEN_IDS) for _ in range(request.length)] + [5 + turn] * turn


def next_turn(
    request: ClientRequest, turn: int, earlier: list[dict[str, str]], text: str
) -> list[dict[str, str]]:
    """The messages of the following turn."""
    asked = earlier or [{"role": "user", "content": sentence(request.story) * request.length}]
    return [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": f"and then {turn}"}]


def host(request: ClientRequest) -> str:
    return f"10.9.0.{request.client + 1}"


async def exchange(one: Exchange, address: tuple[str, int]) -> None:
    """One HTTP/1.1 exchange on a connection of its own; fills in the answer."""
    request, answer = one.request, one.answer
    with on(host(request)):
        await asyncio.create_task(_exchange(one, address))
    if request.leaves_s is not None and answer.end == "silent":
        answer.end = "left"
    one.ended_s = asyncio.get_running_loop().time()


async def _exchange(one: Exchange, address: tuple[str, int]) -> None:
    request, answer = one.request, one.answer
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PATIENCE_S if request.leaves_s is None else request.leaves_s):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(_head(one) + one.body)
            await writer.drain()
            await read_answer(reader, answer, pause_s=_PAUSE_S if request.slow else 0.0)
            answer.end = "complete"
            answer.more = await reader.read()  # ``connection: close`` was asked
    except TimeoutError:
        pass
    except ConnectionRefusedError:
        answer.end = "refused"
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError):
        if answer.end != "complete":
            answer.end = "cut"
    finally:
        if writer is not None and request.resets and answer.end == "silent":
            writer.transport.abort()
        elif writer is not None:
            writer.close()


def _head(one: Exchange) -> bytes:
    request = one.request
    fields = {
        "host": "router",
        "content-type": "application/json",
        "content-length": str(len(one.body)),
        "connection": "close",
        "x-request-id": one.request_id,
        **({"authorization": f"Bearer key-of-{request.tenant}"} if request.tenant else {}),
        **request.fields,
    }
    lines = [f"POST {one.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + _END


async def read_answer(reader: asyncio.StreamReader, answer: Answer, *, pause_s: float = 0.0) -> None:
    """Read one response. Raises what a cut connection or a wrong framing gives."""
    lines = (await reader.readuntil(_END)).decode("latin-1").split("\r\n")
    answer.status = int(lines[0].split()[1])
    answer.head = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
    if answer.head.get("transfer-encoding") != "chunked":
        answer.body = await reader.readexactly(int(answer.head["content-length"]))
        return
    while True:
        size = int((await reader.readline()).split(b";")[0], 16)
        piece = await reader.readexactly(size + 2)
        if not size:
            return
        answer.body += piece[:-2]
        if pause_s:
            await asyncio.sleep(pause_s)


def told(api: str, body: bytes, *, stream: bool) -> Told:
    """Read a body with status 200. Raises ``ValueError`` or ``KeyError`` for an invalid one."""
    found = Told()
    if not stream:
        _whole(api, json.loads(body), found)
        found.whole = True
        return found
    for event in body.split(b"\n\n"):
        data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            found.whole = True
        elif data:
            _piece(api, json.loads(data), found)
    return found


def _whole(api: str, body: dict[str, Any], found: Told) -> None:
    if api == "messages":
        found.text = "".join(block["text"] for block in body["content"])
        found.reason = _ANTHROPIC.get(body.get("stop_reason"), "")
    elif api == "responses":
        found.text = "".join(part["text"] for item in body["output"] for part in item["content"])
        found.reason = {"incomplete": "length", "completed": "stop"}.get(body["status"], body["status"])
    else:
        found.choices = len(body["choices"])
        choice = min(body["choices"], key=lambda one: one["index"])
        found.text = choice["message"]["content"] if "message" in choice else choice["text"]
        found.reason = choice["finish_reason"]
    _usage(api, body.get("usage"), found)


_ANTHROPIC = {"max_tokens": "length", "end_turn": "stop"}


def _piece(api: str, part: dict[str, Any], found: Told) -> None:
    kind = part.get("type", "")
    if part.get("error"):
        found.error = str(part["error"].get("message"))
    if api == "messages":
        found.text += part["delta"]["text"] if kind == "content_block_delta" else ""
        if kind == "message_delta":
            found.reason = _ANTHROPIC.get(part["delta"]["stop_reason"], "")
            _usage(api, part["usage"], found)
        found.whole |= kind == "message_stop"
    elif api == "responses":
        found.text += part["delta"] if kind == "response.output_text.delta" else ""
        if kind in ("response.completed", "response.incomplete"):
            text = found.text
            _whole(api, part["response"], found)
            found.text, found.whole = text, True
        elif kind == "error":
            found.error = str(part.get("message") or found.error)
        elif kind == "response.failed":
            found.error = str((part["response"].get("error") or {}).get("message"))
    else:
        found.names |= {part["id"]} if "id" in part else set()
        for choice in part.get("choices", ()):
            found.roles += "role" in choice.get("delta", {})
            found.choices = max(found.choices, choice["index"] + 1)
            if choice["index"]:
                continue
            found.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found.reason = choice.get("finish_reason") or found.reason
        _usage(api, part.get("usage"), found)


def _usage(api: str, usage: dict[str, Any] | None, found: Told) -> None:
    if not usage:
        return
    if api == "messages":
        found.cached_tokens = usage.get("cache_read_input_tokens", 0)
        found.prompt_tokens = usage["input_tokens"] + (found.cached_tokens or 0)
        found.generated_tokens = usage["output_tokens"]
        return
    names = (
        ("input_tokens", "output_tokens") if api == "responses" else ("prompt_tokens", "completion_tokens")
    )
    details = usage.get(names[0] + "_details") or {}
    found.prompt_tokens, found.generated_tokens = usage[names[0]], usage[names[1]]
    found.cached_tokens = details.get("cached_tokens", found.cached_tokens)
