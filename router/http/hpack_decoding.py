"""Decoding of header fields (HPACK, RFC 7541), with the Huffman code of strings (appendix B).

``HeaderDecoder`` may use the dynamic table up to the default size, as peers do before our settings have
reached them. The Huffman code is canonical, so the lengths of its words define it. Invariants: the table, one
block and the cache are bounded; work is linear in the bytes; after an error (``H2Error``) the connection
ends, as the two tables would differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from kvatlas.router.http.h2_codec import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, H2Error

# Bits of each symbol's word; the last one is EOS, which must not occur (RFC 7541, section 5.2).
_HUFFMAN_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606"
    "0505050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817"
    "181816171817171717151617161717181615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
_HUFFMAN_EOS: Final = 256
_HUFFMAN_BITS_MAX: Final = 30


class HuffmanError(ValueError):
    """Invalid code word or padding."""


def _huffman_rows() -> tuple[list[int], list[tuple[int, int, tuple[int, ...]]]]:
    """Build the decoding tables: for each length, the first word in ``_HUFFMAN_BITS_MAX`` bits; and the
    length, the first word, and the symbols. Words of one length follow those of the next shorter one."""
    begins, rows, word, before = [], [], 0, 0
    for length in sorted(set(_HUFFMAN_LENGTHS)):
        word <<= length - before
        symbols = tuple(symbol for symbol, bits in enumerate(_HUFFMAN_LENGTHS) if bits == length)
        begins.append(word << (_HUFFMAN_BITS_MAX - length))
        rows.append((length, word, symbols))
        word, before = word + len(symbols), length
    return begins, rows


_HUFFMAN_BEGINS, _HUFFMAN_ROWS = _huffman_rows()


def huffman_decode(data: bytes) -> bytes:
    """Decode a string. Raises ``HuffmanError``."""
    out = bytearray()
    held = bits = 0
    for byte in data:
        held = held << 8 | byte
        bits += 8
        while bits >= 5:
            # Missing bits count as 0: a longer word is greater than all shorter ones.
            begin = (
                held << (_HUFFMAN_BITS_MAX - bits)
                if bits <= _HUFFMAN_BITS_MAX
                else held >> (bits - _HUFFMAN_BITS_MAX)
            )
            length, first, symbols = _HUFFMAN_ROWS[bisect_right(_HUFFMAN_BEGINS, begin) - 1]
            if length > bits:
                break
            symbol = symbols[(held >> (bits - length)) - first]
            if symbol == _HUFFMAN_EOS:
                raise HuffmanError("the end of the string is no part of it")
            out.append(symbol)
            bits -= length
            held &= (1 << bits) - 1
        if bits > _HUFFMAN_BITS_MAX:
            raise HuffmanError("no word of the code")
    if bits > 7 or held != (1 << bits) - 1:
        raise HuffmanError("the padding is not of ones")
    return bytes(out)


Field = tuple[bytes, bytes]

# The default size (RFC 7541, section 4.2); our settings do not change it.
_TABLE_BYTES_MAX: Final = 4096
# Size of a field in addition to name and value (RFC 7541, section 4.1).
_FIELD_BYTES: Final = 32
# A block that changes no table and was seen since the table last changed is not decoded again: proxies
# repeat the same few.
_CACHED_BLOCKS_MAX: Final = 64
_CACHED_BYTES_MAX: Final = 1024
_STATIC_TABLE_TEXT: Final = (
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
# Static table (RFC 7541, appendix A); the first entry has the index 1.
_STATIC_TABLE: Final[tuple[Field, ...]] = tuple(
    (name.encode(), value.encode())
    for name, _, value in (item.partition("=") for item in _STATIC_TABLE_TEXT.rstrip("; ").split("; "))
)


class HeaderDecoder:
    """Decoder of one direction of a connection.

    ``list_bytes_max``: largest size of one block's fields, each with ``_FIELD_BYTES`` added.
    """

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._table: deque[Field] = deque()
        self._table_bytes = 0
        self._table_bytes_max = _TABLE_BYTES_MAX
        self._seen: dict[bytes, list[Field]] = {}

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a block, in order; do not change the list. Raises ``H2Error``."""
        cached = self._seen.get(block)
        if cached is not None:
            return cached
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
                index, at = _decode_integer(block, at, 7)
                field = self._lookup(index)
            elif first & 0x60 == 0x20:
                if fields:
                    raise H2Error(COMPRESSION_ERROR, "a table size within a header block")
                limit, at = _decode_integer(block, at, 5)
                self._resize(limit)
                continue
            else:
                keeps = first & 0x40
                index, at = _decode_integer(block, at, 6 if keeps else 4)
                name, at = (self._lookup(index)[0], at) if index else self._decode_string(block, at)
                value, at = self._decode_string(block, at)
                field = (name, value)
                if keeps:
                    self._insert(field)
            total += len(field[0]) + len(field[1]) + _FIELD_BYTES
            if total > self._list_bytes_max:
                raise H2Error(ENHANCE_YOUR_CALM, f"more than {self._list_bytes_max} bytes of header fields")
            fields.append(field)
        return fields

    def _lookup(self, index: int) -> Field:
        if not index:
            raise IndexError("no field has the index 0")
        if index <= len(_STATIC_TABLE):
            return _STATIC_TABLE[index - 1]
        return self._table[index - len(_STATIC_TABLE) - 1]

    def _decode_string(self, block: bytes, at: int) -> tuple[bytes, int]:
        coded = block[at] & 0x80
        length, at = _decode_integer(block, at, 7)
        if length > len(block) - at:
            raise IndexError("a string longer than its block")
        text = block[at : at + length]
        return (huffman_decode(text) if coded else text), at + length

    def _insert(self, field: Field) -> None:
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


def _decode_integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """Decode an integer; return it and the position after it (RFC 7541, section 5.1)."""
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
