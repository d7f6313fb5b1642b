"""Block keys: the name of one block of one KV cache group, outside the GPU.

A key is the engine's full block hash followed by the model's group index, 4 bytes big-endian. The hash is
chained over the whole prefix, so a key names a block's content within one engine configuration; stores that
several engines share put a namespace in front (``connectors.store.namespace``). Keys are compared as bytes,
never truncated: the 64-bit hashes of KV events are for the router, not for finding bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

_GROUP_BYTES = 4


def block_key(block_hash: bytes, group_idx: int) -> bytes:
    """The key of the block with this hash in this group. OverflowError outside 0 <= group_idx < 2**32."""
    return block_hash + group_idx.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """(full block hash, group index) of a key. ValueError where it is too short to be one."""
    if len(key) <= _GROUP_BYTES:
        raise ValueError(f"not a block key: {len(key)} bytes, need a hash and {_GROUP_BYTES} bytes of group")
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def group_of(key: bytes) -> int:
    """Group index of a sound key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def block_hashes_of(keys: Iterable[bytes]) -> list[bytes]:
    """The full block hash of each of many sound keys."""
    return [key[:-_GROUP_BYTES] for key in keys]
