"""ZMQ messages of an event stream, parsed into typed frames. Live: ``[topic, seq, payload]``, where the seq
frame is 8 bytes, or 24 if a publisher epoch follows the seq. Replay: ``[b"", topic, seq, payload]``, from
older publishers without the topic frame, and an end marker whose seq is -1. A message without a usable seq
raises ``WireError`` and has no effect; a payload that is too large or cannot be decoded still yields a
frame, since its seq is used up. ROCm's ATOM sends ``[payload]`` or ``[topic, payload]``, without a seq
(https://github.com/ROCm/ATOM/pull/869): the feed numbers these by arrival.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec
import xxhash

from kvatlas.publisher.event_decoder import decode_in_pieces, finish
from kvatlas.publisher.events import DecodedBatch, EventDecodeError

# Largest payload that is decoded: some 2,500 times a busy engine's usual batch. Locating its events takes up
# to 3 ms per megabyte (measured), without yielding.
PAYLOAD_BYTES_MAX = 16 << 20

FRAME_COUNT = "frame_count"
SEQ_LENGTH = "seq_length"
SEQ_RANGE = "seq_range"
PAYLOAD_OVERSIZE = "payload_oversize"
PAYLOAD_UNDECODABLE = "payload_undecodable"
REASONS = (FRAME_COUNT, SEQ_LENGTH, SEQ_RANGE, PAYLOAD_OVERSIZE, PAYLOAD_UNDECODABLE)

_SEQ_MAX = (1 << 63) - 1
# ``Frame.seq`` of a batch that its publisher did not number.
UNNUMBERED = -1
_END_SEQ = b"\xff" * 8


class WireError(ValueError):
    """A message that cannot be placed in the stream; ``reason`` is one of ``REASONS``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One numbered batch. ``batch`` is None if the payload was unusable; ``fault`` is then the reason."""

    seq: int
    batch: DecodedBatch | None
    digest: int
    """xxh3 of the payload: two frames with equal seq and digest are the same batch of the same process."""
    size_bytes: int
    publisher_id: bytes | None = None
    fault: str | None = None


def parse_live(frames: list[bytes], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> Frame:
    """Parse one SUB message. Raises ``WireError``."""
    return finish(live_in_pieces(frames, payload_bytes_max=payload_bytes_max))


def live_in_pieces(
    frames: list[bytes], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> Generator[None, None, Frame]:
    """Parse one SUB message in pieces, with a yield after each."""
    if len(frames) in {1, 2}:
        frame = yield from _numbered(UNNUMBERED, None, frames[-1], payload_bytes_max)
        if frame.batch is not None:
            return frame
    if len(frames) != 3:
        raise WireError(FRAME_COUNT, f"live message of {len(frames)} frames, expected 3")
    return (yield from _frame(frames[1], frames[2], payload_bytes_max))


def parse_replay(frames: list[bytes], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> Frame | None:
    """Parse one message of a replay response; None for its end marker. Raises ``WireError``."""
    return finish(replay_in_pieces(frames, payload_bytes_max=payload_bytes_max))


def replay_in_pieces(
    frames: list[bytes], *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> Generator[None, None, Frame | None]:
    """Parse one message of a replay response in pieces, with a yield after each."""
    body = frames[1:] if frames and frames[0] == b"" else frames
    if len(body) not in {2, 3}:
        raise WireError(FRAME_COUNT, f"replay message of {len(frames)} frames, expected 3 or 4")
    seq, payload = body[-2:]
    if seq == _END_SEQ:
        return None
    return (yield from _frame(seq, payload, payload_bytes_max))


def _frame(seq_frame: bytes, payload: bytes, payload_bytes_max: int) -> Generator[None, None, Frame]:
    if len(seq_frame) not in {8, 24}:
        raise WireError(SEQ_LENGTH, f"seq frame of {len(seq_frame)} bytes, expected 8 or 24")
    seq = int.from_bytes(seq_frame[:8], "big")
    if seq > _SEQ_MAX:
        raise WireError(SEQ_RANGE, f"seq {seq} is negative as a signed number")
    return (yield from _numbered(seq, seq_frame[8:] or None, payload, payload_bytes_max))


def _numbered(
    seq: int, epoch: bytes | None, payload: bytes, payload_bytes_max: int
) -> Generator[None, None, Frame]:
    size = len(payload)
    if size > payload_bytes_max:
        return Frame(seq, None, size, size, epoch, PAYLOAD_OVERSIZE)
    digest = xxhash.xxh3_64_intdigest(payload)
    try:
        batch = yield from decode_in_pieces(payload)
    except EventDecodeError:
        return Frame(seq, None, digest, size, epoch, PAYLOAD_UNDECODABLE)
    return Frame(seq, batch, digest, size, epoch or batch.publisher_id)
