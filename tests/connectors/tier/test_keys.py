"""Block keys name a block and its group, and come apart again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.tier.base import block_key, split_key


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_a_key_comes_apart_again(block_hash: bytes, group_idx: int) -> None:
    assert split_key(block_key(block_hash, group_idx)) == (block_hash, group_idx)


def test_the_group_is_four_bytes_big_endian_behind_the_whole_hash() -> None:
    assert block_key(b"h" * 32, 258) == b"h" * 32 + b"\x00\x00\x01\x02"


def test_an_invalid_key_is_refused() -> None:
    with pytest.raises(ValueError, match="not a block key: 4 bytes"):
        split_key(b"\x00" * 4)
    with pytest.raises(OverflowError):
        block_key(b"h", -1)
