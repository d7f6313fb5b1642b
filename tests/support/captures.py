"""Fixtures of the capture tools' tests: captures written by hand, and the committed ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvatlas.publisher.block_hash import HashScheme, block_hashes
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
    encode_tokens,
)
from kvatlas.router.tools.capture_writer import CaptureLine, encode_lines
from tests.support.paths import DATA

CAPTURES = sorted((DATA / "captures").glob("*.jsonl.gz"))
BLOCK, WINDOW = 16, 32
SCHEME = HashScheme(hash_block_size=BLOCK)
ENGINE = "http://engine:8000"


def tokens(count: int, seed: int = 1) -> list[int]:
    """Token ids that differ from position to position."""
    return [(seed * 7919 + i * 31) % 5000 + 1 for i in range(count)]


def hashes(token_ids: list[int]) -> list[BlockHash]:
    return block_hashes(token_ids, SCHEME)


def stored(token_ids: list[int], *, blocks: Iterable[int] | None = None, group: int = 0) -> BlockStored:
    """A stored event from token 0; ``blocks`` are those it lists (None: all). Group 1 is a sliding window."""
    known: list[Any] = list(hashes(token_ids))
    listed = known if blocks is None else [known[number] for number in blocks]
    raw = encode_tokens(token_ids[: len(known) * BLOCK])
    kind = ("sliding_window", WINDOW) if group else ("full_attention", None)
    return BlockStored(listed, None, raw, BLOCK, None, "GPU", None, None, group, *kind)


def removed(token_ids: list[int], block: int, *, group: int = 0) -> BlockRemoved:
    gone: list[Any] = [hashes(token_ids)[block]]
    return BlockRemoved(gone, "GPU", group)


CLEARED = AllBlocksCleared()


def write(path: Path, batches: Iterable[tuple[int, Sequence[Event]]], *, source: str = ENGINE) -> Path:
    """A capture of (seq, events); the batch's time stamp and arrival grow by a second each."""
    with path.open("ab") as file:
        for number, (seq, events) in enumerate(batches):
            payload = encode_batch(1000.0 + number, events)
            file.write(encode_lines([CaptureLine(source, 1000.0 + number, "kv", seq, payload)]))
    return path


def truth(capture: Path) -> list[dict[str, Any]]:
    """The prompts sent while a committed capture was recorded."""
    name = capture.name.removesuffix(".jsonl.gz")
    found: list[dict[str, Any]] = json.loads((capture.parent / f"{name}.prompts.json").read_text())
    return found
