"""Recorded truth: a stream of event batches and, between them, prompts with the hit the engine really found.

A trace is ``.jsonl`` or ``.jsonl.gz``, one JSON object per line: a ``header`` first, then ``events`` (base64
of the exact payload, and its ``seq``), ``state`` (distinct hashes per group), ``probe`` (a prompt and its
true ``hit_tokens``) and ``note``. Every fault names file, line and reason (``TraceError``).
"""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from publisher.block_hash import MultimodalItem, PromptExtras
from router.index.learn.layout import ModelFacts


class TraceError(Exception):
    """A trace that cannot be read; the message names file, line and reason."""


class TraceGroup(msgspec.Struct):
    """What of a group's description an operator would have to configure."""

    group_idx: int
    attention_chunk_size: int | None = None
    mamba_cache_mode: str | None = None
    is_eagle: bool = False
    cacheable: bool = True
    """False: a group that publishes nothing and is never looked up."""
    sliding_window: int | None = None
    """Read of groups that publish nothing only: a window that is rebuilt by replay."""


class TraceHeader(msgspec.Struct):
    """The part of a header a consumer may use; what events tell is deliberately not read."""

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
        """What besides tokens enters the hashes of this prompt."""
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
        """The batch as it was on the wire."""
        return base64.b64decode(self.events or "", validate=True)


_LINE = msgspec.json.Decoder(TraceLine)


def trace_files(paths: list[Path]) -> list[Path]:
    """Traces named by files and folders (searched recursively), sorted. Raises ``TraceError`` if none."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += [p for p in path.rglob("*") if p.name.endswith((".jsonl", ".jsonl.gz")) and p.is_file()]
        elif path.exists():
            files.append(path)
        else:
            raise TraceError(f"{path}: no such file or folder")
    if not files:
        raise TraceError(f"no .jsonl or .jsonl.gz trace under {', '.join(map(str, paths))}")
    return sorted(files)


def read_trace(path: Path) -> Iterator[tuple[int, TraceLine]]:
    """(line number, line) of one trace, the header first."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                line = _LINE.decode(text)
                if (number == 1) != (line.header is not None):
                    raise TraceError(f"{path}:{number}: the header must be the first line, and only that")
                if line.probe is not None and line.hit_tokens is None:
                    raise TraceError(f"{path}:{number}: probe without hit_tokens")
                yield number, line
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from None
    if number == 0:
        raise TraceError(f"{path}:1: empty file, expected a header")


def trace_facts(path: Path) -> ModelFacts:
    """What an operator would configure for the engine of this trace (LoRA paths come from its prompts)."""
    header = TraceHeader([])
    lora_paths: dict[str, str] = {}
    for _, line in read_trace(path):
        if line.header is not None:
            header = line.header
        elif line.probe is not None and line.probe.lora_name is not None:
            lora_paths[line.probe.lora_name] = line.probe.lora_path or ""
    chunks = {g.group_idx: g.attention_chunk_size for g in header.groups if g.attention_chunk_size}
    mamba = next((g.mamba_cache_mode for g in header.groups if g.mamba_cache_mode), None)
    return ModelFacts(
        attention_chunk_sizes=chunks,
        mamba_cache_mode=mamba,
        eagle_groups=tuple(g.group_idx for g in header.groups if g.is_eagle),
        partial_hash_hits=header.partial_hash_hits,
        report_mode_full=header.report_mode == "full",
        lora_paths=lora_paths,
        hidden_groups=any(not g.cacheable for g in header.groups),
        replay_tokens=max((g.sliding_window or 0 for g in header.groups if not g.cacheable), default=0),
    )
