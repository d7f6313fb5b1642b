"""HTTP/2 on the wire: frames (RFC 9113, sections 4 and 6) and header compression (HPACK, RFC 7541).

Pure: bytes in, values out. ``FrameReader`` returns complete frames however the bytes were cut, and refuses a
frame longer than the announced maximum before it has arrived. ``HeaderDecoder`` may use the dynamic table up
to the default size, as peers do before our settings have reached them. What we send is never indexed: our
header blocks are few and made once. Always true: the table, one block and the cache are bounded; every error
is an ``H2Error``; after one of the decoder the connection ends, as the two tables would differ.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB

SETTINGS_HEADER_TABLE_SIZE, SETTINGS_MAX_CONCURRENT_STREAMS = 0x1, 0x3
SETTINGS_INITIAL_WINDOW_SIZE, SETTINGS_MAX_FRAME_SIZE, SETTINGS_MAX_HEADER_LIST_SIZE = 0x4, 0x5, 0x6

WINDOW_DEFAULT: Final = 65_535
WINDOW_MAX: Final = (1 << 31) - 1
FRAME_BYTES_MIN: Final = 16_384
"""Frame size that every peer accepts; also the default."""
FRAME_BYTES_MAX: Final = (1 << 24) - 1
_HEAD: Final = struct.Struct(">BHBBI")  # length in two parts, kind, flags, stream
_HEAD_BYTES: Final = 9


class H2Error(Exception):
    """The peer broke the protocol or a limit: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class H2Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame without its head."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Bytes in, whole frames out."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[H2Frame]:
        """The frames that are whole now. Raises ``H2Error`` where the next one is too long."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < _HEAD_BYTES or len(rest) < _HEAD_BYTES + int.from_bytes(rest[:3]):
                self._check(rest, 0)
                return
            data = bytes(rest)
            rest.clear()
        at, size = 0, len(data)
        while size - at >= _HEAD_BYTES:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
            begin = at + _HEAD_BYTES
            end = begin + (high << 16 | low)
            if end > size or end - begin > self._frame_bytes_max:
                break
            at = end
            yield H2Frame(kind, flags, stream_id & WINDOW_MAX, data[begin:end])
        if at < size:
            self._check(data, at)
            rest += data[at:]

    def _check(self, data: bytes | bytearray, at: int) -> None:
        """Of a frame that is not whole: is it short enough?"""
        length = int.from_bytes(data[at : at + 3])
        if len(data) - at >= 3 and length > self._frame_bytes_max:
            raise H2Error(FRAME_SIZE_ERROR, f"a frame of {length} bytes")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return frame_head(kind, flags, stream_id, len(payload)) + payload


def frame_head(kind: int, flags: int, stream_id: int, size: int) -> bytes:
    """Return the header of a frame with a payload of this length."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def settings_frame(values: dict[int, int]) -> bytes:
    """Our settings."""
    pairs = (key.to_bytes(2) + value.to_bytes(4) for key, value in values.items())
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def read_settings(payload: bytes) -> dict[int, int]:
    """A peer's settings. Raises ``H2Error``."""
    if len(payload) % 6:
        raise H2Error(FRAME_SIZE_ERROR, "SETTINGS of an odd size")
    return {
        int.from_bytes(payload[at : at + 2]): int.from_bytes(payload[at + 2 : at + 6])
        for at in range(0, len(payload), 6)
    }


def goaway_frame(last_stream_id: int, code: int, why: str = "") -> bytes:
    """The last stream that will be answered, and why."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + why.encode()[:200])


def window_frame(stream_id: int, increment: int) -> bytes:
    """Allow the peer to send this number of further bytes; stream 0: on the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def reset_frame(stream_id: int, code: int) -> bytes:
    """The stream ends here."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def unpadded(found: H2Frame) -> bytes:
    """A DATA or HEADERS payload without its padding. Raises ``H2Error``."""
    if not found.flags & PADDED:
        return found.payload
    payload = found.payload
    if not payload or payload[0] > len(payload) - 1:
        raise H2Error(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def fragment(found: H2Frame) -> bytes:
    """The header block in a HEADERS frame. Raises ``H2Error``."""
    block = unpadded(found)
    if not found.flags & HAS_PRIORITY:
        return block
    if len(block) < 5:
        raise H2Error(FRAME_SIZE_ERROR, "a priority without its five bytes")
    if int.from_bytes(block[:4]) & WINDOW_MAX == found.stream_id:
        raise H2Error(PROTOCOL_ERROR, "a stream that depends on itself")
    return block[5:]


def word(payload: bytes) -> int:
    """The one number of a WINDOW_UPDATE or RST_STREAM. Raises ``H2Error``."""
    if len(payload) != 4:
        raise H2Error(FRAME_SIZE_ERROR, "a frame of four bytes has another size")
    return int.from_bytes(payload)


# The Huffman code of header strings (RFC 7541, appendix B), decoding only: what we send is short and plain.
#
# The code is canonical, so it follows from the lengths of its words alone. Always true: work is linear in
# the bytes given.


_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606"
    "0505050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817"
    "181816171817171717151617161717181615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
"""Bits of each symbol's word; the last one is the end of the string, which must not occur."""
_END: Final = 256
_BITS_MAX: Final = 30


class HuffmanError(ValueError):
    """No word of the code, or the wrong padding."""


def _by_length() -> tuple[list[int], list[tuple[int, int, tuple[int, ...]]]]:
    """For each length of words: where its words begin, in ``_BITS_MAX`` bits, and the length, its first word,
    and its symbols. Words of one length follow those of the next shorter one."""
    begins, rows, word, before = [], [], 0, 0
    for length in sorted(set(_LENGTHS)):
        word <<= length - before
        symbols = tuple(symbol for symbol, bits in enumerate(_LENGTHS) if bits == length)
        begins.append(word << (_BITS_MAX - length))
        rows.append((length, word, symbols))
        word, before = word + len(symbols), length
    return begins, rows


_BEGINS, _ROWS = _by_length()


def huffman_decode(data: bytes) -> bytes:
    """The string behind these bytes. Raises ``HuffmanError``."""
    out = bytearray()
    held = bits = 0
    for byte in data:
        held = held << 8 | byte
        bits += 8
        while bits >= 5:
            # Bits that have not come count as 0: the beginning of a longer word lies behind all shorter ones.
            begin = held << (_BITS_MAX - bits) if bits <= _BITS_MAX else held >> (bits - _BITS_MAX)
            length, first, symbols = _ROWS[bisect_right(_BEGINS, begin) - 1]
            if length > bits:
                break
            symbol = symbols[(held >> (bits - length)) - first]
            if symbol == _END:
                raise HuffmanError("the end of the string is no part of it")
            out.append(symbol)
            bits -= length
            held &= (1 << bits) - 1
        if bits > _BITS_MAX:
            raise HuffmanError("no word of the code")
    if bits > 7 or held != (1 << bits) - 1:
        raise HuffmanError("the padding is not of ones")
    return bytes(out)


Field = tuple[bytes, bytes]

_TABLE_BYTES_MAX: Final = 4096
"""The default of every peer; we ask for nothing else."""
_FIELD_BYTES: Final = 32
"""Size of a field beyond name and value (RFC 7541, section 4.1)."""
# A block that changes no table and was seen since the table last changed is not decoded again: proxies
# repeat the same few.
_CACHED_BLOCKS_MAX: Final = 64
_CACHED_BYTES_MAX: Final = 1024
_STATIC_TEXT: Final = (
    ":authority; :method=GET; :method=POST; :path=/; :path=/index.html; :scheme=http; :scheme=https; "
    ":status=200; :status=204; :status=206; :status=304; :status=400; :status=404; :status=500; "
    "accept-charset; accept-encoding=gzip, deflate; accept-language; accept-ranges; accept; "
    "access-control-allow-origin; age; allow; authorization; cache-control; content-disposition; "
    "content-encoding; content-language; content-length; content-location; content-range; "
    "content-type; cookie; date; etag; expect; expires; from; host; if-match; if-modified-since; "
    "if-none-match; if-range; if-unmodified-since; last-modified; link; location; max-forwards; "
    "proxy-authenticate; proxy-authorization; range; referer; refresh; retry-after; server; "
    "set-cookie; strict-transport-security; transfer-encoding; user-agent; vary; via; "
    "www-authenticate; "
)
_STATIC: Final[tuple[Field, ...]] = tuple(
    (name.encode(), value.encode())
    for name, _, value in (item.partition("=") for item in _STATIC_TEXT.rstrip("; ").split("; "))
)
"""RFC 7541, appendix A; the first one has the index 1."""


class HeaderDecoder:
    """One direction of one connection. ``list_bytes_max``: most bytes of one block's fields, each with
    ``_FIELD_BYTES`` more."""

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._table: deque[Field] = deque()
        self._table_bytes = 0
        self._table_bytes_max = _TABLE_BYTES_MAX
        self._seen: dict[bytes, list[Field]] = {}

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block, in order; not to be changed. Raises ``H2Error``."""
        found = self._seen.get(block)
        if found is not None:
            return found
        self._changed = False
        try:
            fields = self._fields(block)
        except (IndexError, HuffmanError) as error:
            raise H2Error(COMPRESSION_ERROR, f"header block: {error}") from None
        if self._changed or len(self._seen) >= _CACHED_BLOCKS_MAX:
            self._seen.clear()
        if not self._changed and len(block) <= _CACHED_BYTES_MAX:
            self._seen[block] = fields
        return fields

    def _fields(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        at, size, total = 0, len(block), 0
        while at < size:
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                field = self._at(index)
            elif first & 0x60 == 0x20:
                if fields:
                    raise H2Error(COMPRESSION_ERROR, "a table size within a header block")
                limit, at = _integer(block, at, 5)
                self._resize(limit)
                continue
            else:
                keeps = first & 0x40
                index, at = _integer(block, at, 6 if keeps else 4)
                name, at = (self._at(index)[0], at) if index else self._string(block, at)
                value, at = self._string(block, at)
                field = (name, value)
                if keeps:
                    self._keep(field)
            total += len(field[0]) + len(field[1]) + _FIELD_BYTES
            if total > self._list_bytes_max:
                raise H2Error(ENHANCE_YOUR_CALM, f"more than {self._list_bytes_max} bytes of header fields")
            fields.append(field)
        return fields

    def _at(self, index: int) -> Field:
        if not index:
            raise IndexError("no field has the index 0")
        if index <= len(_STATIC):
            return _STATIC[index - 1]
        return self._table[index - len(_STATIC) - 1]

    def _string(self, block: bytes, at: int) -> tuple[bytes, int]:
        coded = block[at] & 0x80
        length, at = _integer(block, at, 7)
        if length > len(block) - at:
            raise IndexError("a string longer than its block")
        text = block[at : at + length]
        return (huffman_decode(text) if coded else text), at + length

    def _keep(self, field: Field) -> None:
        self._changed = True
        self._table.appendleft(field)
        self._table_bytes += len(field[0]) + len(field[1]) + _FIELD_BYTES
        self._evict()

    def _resize(self, limit: int) -> None:
        if limit > _TABLE_BYTES_MAX:
            raise H2Error(COMPRESSION_ERROR, f"a table of {limit} bytes")
        self._changed = True
        self._table_bytes_max = limit
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._table_bytes_max:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _FIELD_BYTES


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """A number and where the next thing begins (RFC 7541, section 5.1)."""
    mask = (1 << prefix_bits) - 1
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 28:
            raise IndexError("a number of more than 32 bits")


def literal(name: bytes, value: bytes) -> bytes:
    """A field as we send it: never indexed, never Huffman coded."""
    return b"\0%b%b%b%b" % (_length(len(name)), name, _length(len(value)), value)


def _length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    out = bytearray(b"\x7f")
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


# Header blocks out of HEADERS and CONTINUATION frames.
#
# Pure. Always true: while a block is not whole nothing else may come; its size and its pieces are bounded.


_PIECES_MAX = 64


class HeaderBlocks:
    """``block_bytes_max``: of one block."""

    def __init__(self, block_bytes_max: int) -> None:
        self._block_bytes_max = block_bytes_max
        self.begun = False
        """A block is not whole."""
        self._first: H2Frame | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, found: H2Frame) -> tuple[H2Frame, bytes] | None:
        """A HEADERS or CONTINUATION frame. Returns the frame that began the block, and all of it, once it is
        whole. Raises ``H2Error``."""
        if found.kind == HEADERS:
            self._first, self._pieces = found, [fragment(found)]
            self._size = len(self._pieces[0])
        elif self._first is None or self._first.stream_id != found.stream_id:
            raise H2Error(PROTOCOL_ERROR, "a continuation of nothing")
        else:
            self._size += len(found.payload)
            self._pieces.append(found.payload)
        if self._size > self._block_bytes_max or len(self._pieces) > _PIECES_MAX + 1:
            raise H2Error(ENHANCE_YOUR_CALM, "a header block that is too long")
        self.begun = not found.flags & END_HEADERS
        if self.begun:
            return None
        first, self._first = self._first, None
        return first, b"".join(self._pieces)
