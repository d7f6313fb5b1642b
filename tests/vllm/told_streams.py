"""The content of a stream of vLLM's, in whatever pieces it came."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class ToldStream:
    """Of one stream with one choice. ``ended``: finish reason and stop reason; ``error``: an error's code."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments of calls of tools."""
    call_ids: list[str] = field(default_factory=list)
    roles: int = 0
    names: set[str] = field(default_factory=set)
    ended: tuple[str | None, Any] = (None, None)
    done: bool = False
    error: int | str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    """Token ids that the client has not asked for."""

    def same(self, other: ToldStream) -> bool:
        """Whether both say the same answer, to the last place of a log probability."""
        mine, others = (
            (
                one.text,
                one.reasoning,
                one.calls,
                len(one.call_ids),
                one.roles,
                one.ended,
                one.done,
                one.error,
                one.tokens,
                one.offsets,
                one.ids,
            )
            for one in (self, other)
        )
        return (
            mine == others
            and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
            and len(self.names) == len(other.names) == 1
            and _counts(self.usage) == _counts(other.usage)
        )


def _counts(usage: dict[str, Any]) -> list[Any]:
    return [usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


def told(stream: bytes) -> ToldStream:
    """Read a stream. Raises ``ValueError`` for an event that is none."""
    said = ToldStream()
    for event in stream.split(b"\n\n"):
        if not event or event.startswith(b":"):
            continue
        value = event.removeprefix(b"data: ")
        if value == b"[DONE]":
            said.done = True
            continue
        _take(said, json.loads(value))
    return said


def _take(said: ToldStream, part: dict[str, Any]) -> None:
    if "error" in part:
        said.error = part["error"].get("code")
        return
    said.names.add(part["id"])
    said.usage = part.get("usage") or said.usage
    said.ids += [part["prompt_token_ids"]] if part.get("prompt_token_ids") else []
    for choice in part["choices"]:
        delta = choice.get("delta", {})
        said.roles += "role" in delta
        said.text += choice.get("text") or delta.get("content") or ""
        said.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            _call(said, call)
        if choice["finish_reason"] is not None:
            said.ended = choice["finish_reason"], choice.get("stop_reason")
        said.ids += [choice[name] for name in ("token_ids", "prompt_token_ids") if choice.get(name)]
        probable = choice.get("logprobs") or {}
        for entry in probable.get("content") or ():
            said.tokens.append(entry["token"])
            said.logprobs.append(entry["logprob"])
        said.tokens += probable.get("tokens") or []
        said.logprobs += probable.get("token_logprobs") or []
        said.offsets += probable.get("text_offset") or []


def _call(said: ToldStream, call: dict[str, Any]) -> None:
    if call["index"] == len(said.calls):
        said.calls.append(["", ""])
    mine, function = said.calls[call["index"]], call.get("function") or {}
    said.call_ids += [call["id"]] if call.get("id") else []
    mine[0] += function.get("name") or ""
    mine[1] += function.get("arguments") or ""
