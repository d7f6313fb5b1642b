"""The content of a stream of vLLM's, in whatever pieces it came."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    forms: set[str] = field(default_factory=set)
    """Its events without what they say: their members, in order."""

    def same(self, other: ToldStream, *, forms: bool = True) -> bool:
        """Whether both say the same answer, to the last place of a log probability, and with ``forms`` this
        one in events of the other one's forms."""
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
            and (self.forms <= other.forms or not forms)
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
    said.forms.update(_forms(part))
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


_SAID = {
    "id",
    "created",
    "text",
    "content",
    "reasoning",
    "usage",
    "finish_reason",
    "stop_reason",
    "top_logprobs",
}


def _forms(part: dict[str, Any]) -> Iterator[str]:
    """Forms of an event and of each thing that it adds. An end that the router adds has no fingerprint, an
    end of a chat no ``weight_versions`` (0.33), and calls of tools have no text instead of null."""
    yield _form({name: one for name, one in part.items() if name != "system_fingerprint"})
    for choice in part["choices"]:
        for name, one in choice.get("delta", {}).items():
            if one is not None:
                yield f"{name}: {_form(one)}"


def _form(value: Any) -> str:
    """A value without what differs from event to event: texts, numbers, lengths of lists."""
    if isinstance(value, dict):
        members = [
            f"{name}:{'' if name in _SAID else _form(one)}"
            for name, one in value.items()
            if name != "weight_versions"
        ]
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + (_form({**value[0], "delta": ""}) if value and isinstance(value[0], dict) else "") + "]"
    return "null" if value is None else type(value).__name__
