"""The Huffman code of header strings (RFC 7541, appendix B), decoding only: what we send is short and plain.

The code is canonical, so it follows from the lengths of its words alone. Always true: work is linear in the
bytes given.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

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


def decode(data: bytes) -> bytes:
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
