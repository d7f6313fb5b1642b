"""Captures: what engines published, frame by frame, in a file.

``.jsonl`` or ``.jsonl.gz``, one object per line: ``source`` (the engine), ``recv_ts`` (seconds since the
epoch), ``topic``, ``seq`` and ``payload_b64`` (the exact bytes of the batch, base64). The pieces of a
rotated capture are read one after the other. Recorded truth (``verify.traces``) is read too, as one
engine named ``recorded``. Always true: reading yields frames or raises ``CaptureError``, which names file,
line and reason.
"""

from __future__ import annotations

import binascii
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from router.tools.verify.traces import TraceError, read_trace

LINE_BYTES_MAX = 128 << 20
"""Longest line that is read: the largest payload a feed decodes, in base64, fits."""
TRACE_SOURCE = "recorded"

_SUFFIXES = (".jsonl", ".jsonl.gz")
_Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class CaptureError(Exception):
    """A capture that cannot be read or written; the message names file, line and reason."""


class CapturedFrame(NamedTuple):
    """One message of one engine. ``path`` and ``line`` say where it stands."""

    path: Path
    line: int
    source: str
    recv_ts: float
    topic: str
    seq: int
    payload: bytes


class CaptureLine(msgspec.Struct, frozen=True, gc=False):
    """One line to be written; the payload is as it was on the wire."""

    source: str
    recv_ts: float
    topic: str
    seq: int
    payload: bytes = msgspec.field(name="payload_b64")


class _Line(msgspec.Struct, gc=False):
    source: str
    recv_ts: float
    topic: str
    seq: _Seq
    payload_b64: str


_ENCODER = msgspec.json.Encoder()
_LINE = msgspec.json.Decoder(_Line)
_FIRST: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BAD_LINE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)
_BAD_FILE = (OSError, EOFError, zlib.error)


def is_capture_name(path: Path) -> bool:
    """Whether a capture may be called that."""
    return path.name.endswith(_SUFFIXES)


def encode_lines(lines: Sequence[CaptureLine]) -> bytes:
    """The lines, each with its newline."""
    return _ENCODER.encode_lines(lines)


def encode_line(source: str, recv_ts: float, topic: str, seq: int, payload: bytes) -> bytes:
    """One line, newline included."""
    return encode_lines([CaptureLine(source, recv_ts, topic, seq, payload)])


def read_capture(paths: Sequence[Path]) -> Iterator[CapturedFrame]:
    """All frames of one capture, its pieces in the order given. Raises ``CaptureError``."""
    for path in paths:
        yield from _read_trace(path) if is_trace(path) else _read_frames(path)


def is_trace(path: Path) -> bool:
    """Whether this is recorded truth, by its first line. Raises ``CaptureError`` for no JSON lines at all."""
    for number, text in _lines(path):
        try:
            return "header" in _FIRST.decode(text)
        except _BAD_LINE as error:
            raise CaptureError(f"{path}:{number}: {error}") from None
    raise CaptureError(f"{path}:1: empty file, expected frames")


def sources(frames: Iterable[CapturedFrame]) -> list[str]:
    """The engines of a capture, in the order of their first frame."""
    return list(dict.fromkeys(frame.source for frame in frames))


def _read_frames(path: Path) -> Iterator[CapturedFrame]:
    for number, text in _lines(path):
        try:
            line = _LINE.decode(text)
            payload = binascii.a2b_base64(line.payload_b64, strict_mode=True)
        except _BAD_LINE as error:
            raise CaptureError(f"{path}:{number}: {error}") from None
        yield CapturedFrame(path, number, line.source, line.recv_ts, line.topic, line.seq, payload)


def _read_trace(path: Path) -> Iterator[CapturedFrame]:
    next_seq, number = 0, 1
    try:
        for number, line in read_trace(path):
            if line.events is None:
                continue
            seq = next_seq if line.seq is None else line.seq
            if not 0 <= seq < 1 << 63:
                raise CaptureError(f"{path}:{number}: seq {seq} is not a sequence number")
            yield CapturedFrame(path, number, TRACE_SOURCE, 0.0, "", seq, line.payload())
            next_seq = seq + 1
    except TraceError as error:
        raise CaptureError(str(error)) from None
    except ValueError as error:  # not base64
        raise CaptureError(f"{path}:{number}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, text) of every line that is not blank."""
    number = 0
    try:
        with _open(path) as lines:
            while text := lines.readline(LINE_BYTES_MAX):
                number += 1
                if len(text) == LINE_BYTES_MAX:
                    raise CaptureError(f"{path}:{number}: line over {LINE_BYTES_MAX} bytes")
                if text.strip():
                    yield number, text
    except _BAD_FILE as error:
        raise CaptureError(f"{path}:{number + 1}: cannot be read: {error}") from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
