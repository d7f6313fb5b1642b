"""Captures: the event messages that engines published, recorded frame by frame in a file.

``.jsonl`` or ``.jsonl.gz``, one object per line: ``source`` (the engine), ``recv_ts`` (seconds since the
epoch), ``topic``, ``seq`` and ``payload_b64`` (the exact bytes of the batch, base64). The pieces of a rotated
capture are read one after the other. Verification traces are read too, as one engine named ``recorded``.
Reading yields frames or raises ``RecordingError``, which names file, line and reason.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvatlas.router.tools.trace_file import RecordingError, numbered_lines, read_trace

TRACE_SOURCE = "recorded"

_Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class CapturedFrame(NamedTuple):
    """One message of one engine. ``path`` and ``line`` are its position in the capture."""

    path: Path
    line: int
    source: str
    recv_ts: float
    topic: str
    seq: int
    payload: bytes


class _Line(msgspec.Struct, gc=False):
    source: str
    recv_ts: float
    topic: str
    seq: _Seq
    payload_b64: str


_LINE = msgspec.json.Decoder(_Line)
_FIRST: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BAD_LINE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def read_capture(paths: Sequence[Path]) -> Iterator[CapturedFrame]:
    """Yield all frames of one capture, its pieces in the given order. Raises ``RecordingError``."""
    for path in paths:
        yield from _read_trace(path) if is_trace(path) else _read_frames(path)


def is_trace(path: Path) -> bool:
    """Whether the file is a verification trace, by its first line.

    Raises ``RecordingError`` if it is not JSON lines.
    """
    for number, text in _frame_lines(path):
        try:
            return "header" in _FIRST.decode(text)
        except _BAD_LINE as error:
            raise RecordingError(f"{path}:{number}: {error}") from None
    raise RecordingError(f"{path}:1: empty file, expected frames")


def _frame_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    return ((number, text) for number, text in numbered_lines(path) if text.strip())


def _read_frames(path: Path) -> Iterator[CapturedFrame]:
    for number, text in _frame_lines(path):
        try:
            line = _LINE.decode(text)
            payload = binascii.a2b_base64(line.payload_b64, strict_mode=True)
        except _BAD_LINE as error:
            raise RecordingError(f"{path}:{number}: {error}") from None
        yield CapturedFrame(path, number, line.source, line.recv_ts, line.topic, line.seq, payload)


def _read_trace(path: Path) -> Iterator[CapturedFrame]:
    next_seq, number = 0, 1
    try:
        for number, line in read_trace(path):
            if line.events is None:
                continue
            seq = next_seq if line.seq is None else line.seq
            if not 0 <= seq < 1 << 63:
                raise RecordingError(f"{path}:{number}: seq {seq} is not a sequence number")
            yield CapturedFrame(path, number, TRACE_SOURCE, 0.0, "", seq, line.payload())
            next_seq = seq + 1
    except ValueError as error:  # not base64
        raise RecordingError(f"{path}:{number}: {error}") from None


_EVERY_FRAMES = 256


def with_progress(frames: Iterable[CapturedFrame], label: str, *, quiet: bool) -> Iterator[CapturedFrame]:
    """Yield the same frames and count them on standard error, if that is a terminal and not ``quiet``."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(label, total=None)
        for number, frame in enumerate(frames):
            if number % _EVERY_FRAMES == 0:
                progress.update(task, completed=number)
            yield frame
