"""Traces: a stream of event batches and, between them, prompts with the hit the engine really found. A trace
is ``.jsonl`` or ``.jsonl.gz``, one JSON object per line: a ``header`` first, then ``events`` (base64 of the
exact payload, and its ``seq``), ``state`` (distinct hashes per group), ``probe`` (a prompt and its true
``hit_tokens``) and ``note``. Every error names file, line and reason (``RecordingError``).
"""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.publisher.block_hash import MultimodalItem, PromptExtras
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.index.learn.layout import ModelFacts

# Longest line that is read: fits the largest payload a feed decodes, in base64.
LINE_BYTES_MAX = 128 << 20


class RecordingError(Exception):
    """A trace or capture that cannot be read or written; the message names file, line and reason."""


class TraceGroup(msgspec.Struct):
    """The facts of a group that an operator would have to configure."""

    group_idx: int
    attention_chunk_size: int | None = None
    mamba_cache_mode: str | None = None
    is_eagle: bool = False
    apart: bool = False
    """A drafter's group that is not looked up with groups that look like it."""
    cacheable: bool = True
    """False: a group that publishes no events and is never looked up."""
    sliding_window: int | None = None
    """Used for groups without events only: a window that is rebuilt by replay."""


class TraceHeader(msgspec.Struct):
    """The part of a header that may be used; facts carried by events are deliberately not read."""

    groups: list[TraceGroup]
    family: str = ""
    report_mode: str = "incremental"
    partial_hash_hits: bool | None = None


class TraceProbe(msgspec.Struct):
    """A prompt of a trace."""

    token_ids: list[int]
    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    mm: list[tuple[str, int, int]] | None = None

    def extras(self) -> PromptExtras:
        """Return the inputs of this prompt's hashes besides its tokens."""
        items = tuple(MultimodalItem(*item) for item in self.mm or ())
        return PromptExtras(self.lora_name, self.lora_path, self.cache_salt, items)


class TraceState(msgspec.Struct):
    keys: list[int]


class TraceLine(msgspec.Struct):
    """One line: a header, events, a state, a probe with its hit, or a note; other fields are ignored."""

    header: TraceHeader | None = None
    events: str | None = None
    seq: int | None = None
    state: TraceState | None = None
    probe: TraceProbe | None = None
    hit_tokens: int | None = None
    note: Any = None

    def payload(self) -> bytes:
        """Decode the exact bytes of the batch."""
        return base64.b64decode(self.events or "", validate=True)


_LINE = msgspec.json.Decoder(TraceLine)


def trace_files(paths: list[Path]) -> list[Path]:
    """Find traces by files and folders (searched recursively), sorted.

    Raises ``RecordingError`` if there are none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += [p for p in path.rglob("*") if p.name.endswith((".jsonl", ".jsonl.gz")) and p.is_file()]
        elif path.exists():
            files.append(path)
        else:
            raise RecordingError(f"{path}: no such file or folder")
    if not files:
        raise RecordingError(f"no .jsonl or .jsonl.gz trace under {', '.join(map(str, paths))}")
    return sorted(files)


def read_trace(path: Path) -> Iterator[tuple[int, TraceLine]]:
    """Yield (line number, line) of one trace, the header first."""
    number = 0
    try:
        for number, text in numbered_lines(path):
            line = _LINE.decode(text)
            if (number == 1) != (line.header is not None):
                raise RecordingError(
                    f"{path}:{number}: the header must be the first line, and only the first"
                )
            if line.probe is not None and line.hit_tokens is None:
                raise RecordingError(f"{path}:{number}: probe without hit_tokens")
            yield number, line
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"{path}:{number}: {error}") from None
    if number == 0:
        raise RecordingError(f"{path}:1: empty file, expected a header")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, text) of each line of a file, which may be compressed. Raises ``RecordingError``."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            while text := lines.readline(LINE_BYTES_MAX):
                number += 1
                if len(text) == LINE_BYTES_MAX:
                    raise RecordingError(f"{path}:{number}: line over {LINE_BYTES_MAX} bytes")
                yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path}:{number + 1}: cannot be read: {describe_error(error)}") from None


def trace_facts(path: Path) -> ModelFacts:
    """Return the facts an operator would configure for this trace's engine (LoRA paths: its prompts')."""
    header = TraceHeader([])
    lora_paths: dict[str, str] = {}
    for _, line in read_trace(path):
        if line.header is not None:
            header = line.header
        elif line.probe is not None and line.probe.lora_name is not None:
            lora_paths[line.probe.lora_name] = line.probe.lora_path or ""
    return header_facts(header, lora_paths)


def header_facts(header: TraceHeader, lora_paths: dict[str, str]) -> ModelFacts:
    """Return the facts an operator would configure for the engine that a trace's header describes."""
    chunks = {g.group_idx: g.attention_chunk_size for g in header.groups if g.attention_chunk_size}
    mamba = next((g.mamba_cache_mode for g in header.groups if g.mamba_cache_mode), None)
    return ModelFacts(
        attention_chunk_sizes=chunks,
        mamba_cache_mode=mamba,
        eagle_groups=tuple(g.group_idx for g in header.groups if g.is_eagle),
        eagle_groups_apart=any(g.apart for g in header.groups),
        partial_hash_hits=header.partial_hash_hits,
        report_mode_full=header.report_mode == "full",
        lora_paths=lora_paths,
        hidden_groups=any(not g.cacheable for g in header.groups),
        replay_tokens=max((g.sliding_window or 0 for g in header.groups if not g.cacheable), default=0),
    )
