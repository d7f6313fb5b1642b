"""What a model's ``config.json`` says that no KV event carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

_BYTES_MAX: Final = 4 << 20
_TEXT_PARTS: Final = ("text_config", "llm_config")
"""Where models of several kinds of input have the configuration of their text model."""


def attention_chunk_size(folder: Path) -> int | None:
    """Tokens of a chunk of chunked local attention; None where the file says none, or is none."""
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    parts = [part for name in _TEXT_PARTS if isinstance(part := found.get(name), dict)]
    for part in (*parts, found):
        size = part.get("attention_chunk_size")
        if type(size) is int and size > 0:
            return size
    return None
