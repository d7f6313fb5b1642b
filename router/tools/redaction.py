"""Removes user content from a batch and keeps what residency needs: hashes, sizes, groups, parents.

Token ids and look-ahead tokens become zeros, cache salts become ``redacted``; all other fields stay,
unknown ones included. Of an event of an unknown type only the type stays. Block hashes are not recomputed,
so a redacted capture replays to the same residency; only the hash scheme can no longer be detected from it.
"""

from __future__ import annotations

from typing import Any

import msgspec

_MSGPACK = msgspec.msgpack.Encoder()
_BATCH: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ANY = msgspec.msgpack.Decoder()
_MAP: msgspec.msgpack.Decoder[dict[str, msgspec.Raw]] = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_BAD = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, TypeError)
SALT = "redacted"
_STORED = "BlockStored"
_HARMLESS = frozenset({"BlockRemoved", "AllBlocksCleared"})
# Positions in the array form of ``BlockStored``, its tag first (vLLM 0.20 to 0.23).
_ARRAY_TOKENS, _ARRAY_LORA, _ARRAY_KEYS = 3, 7, 8


def redact(payload: bytes) -> bytes | None:
    """Return the batch without token ids; None if its token ids cannot be located."""
    try:
        ts, events, *rest = _BATCH.decode(payload)
        redacted = [_event(raw) for raw in _BATCH.decode(events)]
    except _BAD:
        return None
    return _MSGPACK.encode([ts, redacted, *rest])


def _event(raw: msgspec.Raw) -> Any:
    """Redact one event. Raises ``ValueError`` if it has no type."""
    first = memoryview(raw)[0]
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return _array(_BATCH.decode(raw))
    fields = _MAP.decode(raw)
    tag = _ANY.decode(fields["type"]) if "type" in fields else None
    if tag == _STORED:
        lora = _ANY.decode(fields["lora_name"]) if "lora_name" in fields else None
        _replace(fields, "token_ids", _zeros)
        _replace(fields, "lookahead_token_ids", _zeros)
        _replace(fields, "extra_keys", lambda keys: _keys(keys, lora))
        _replace(fields, "cache_salt", lambda salt: None if salt is None else SALT)
    elif tag not in _HARMLESS:
        return {"type": _unknown(tag)}
    return fields


def _unknown(tag: Any) -> str:
    if isinstance(tag, str):
        return tag
    raise ValueError("event without a type")


def _array(items: list[msgspec.Raw]) -> list[Any]:
    tag = _ANY.decode(items[0]) if items else None
    if tag in _HARMLESS:
        return list(items)
    if tag != _STORED:
        return [_unknown(tag)]
    changed: list[Any] = list(items)
    changed[_ARRAY_TOKENS] = _zeros(_ANY.decode(items[_ARRAY_TOKENS]))
    if len(items) > _ARRAY_KEYS:
        lora = _ANY.decode(items[_ARRAY_LORA])
        changed[_ARRAY_KEYS] = _keys(_ANY.decode(items[_ARRAY_KEYS]), lora)
    return changed


def _replace(fields: dict[str, msgspec.Raw], name: str, change: Any) -> None:
    if name in fields:
        fields[name] = msgspec.Raw(_MSGPACK.encode(change(_ANY.decode(fields[name]))))


def _zeros(tokens: Any) -> Any:
    """Return the same shape with every number 0; None stays."""
    if isinstance(tokens, list):
        return [_zeros(item) for item in tokens]
    if tokens is None:
        return None
    if isinstance(tokens, int):
        return 0
    raise ValueError("token ids that are no list of numbers")


def _keys(keys: Any, lora_name: Any) -> Any:
    """Redact cache salts in extra keys."""
    # A salt is a string that is neither the adapter's name nor part of a pair with a number (a multimodal
    # item: the hash of its content, and its offset).
    if not isinstance(keys, list):
        return keys
    return [
        block if not isinstance(block, list) else [_key(key, lora_name) for key in block] for block in keys
    ]


def _key(key: Any, lora_name: Any) -> Any:
    if isinstance(key, str):
        return key if key == lora_name else SALT
    if isinstance(key, list) and not any(isinstance(part, int) for part in key):
        return [key[0], *[SALT if part != lora_name else part for part in key[1:]]] if key else key
    return key
