"""The merged configuration as lines to read, each with where it came from."""

from __future__ import annotations

from typing import Any

import msgspec

from router.config.load import Loaded
from router.replication.redis.url import redacted


def describe(loaded: Loaded) -> str:
    """The merged configuration, one ``key = value`` line each, with the source of what is not a default."""
    lines = []
    for key, value in _flatten(msgspec.to_builtins(loaded.config)):
        shown = redacted(value) if key == "index.url" else value
        source = next(
            (s for k, s in loaded.sources.items() if key == k or key.startswith(f"{k}[")), "default"
        )
        lines.append(f"{key} = {msgspec.json.encode(shown).decode()}  # {source}\n")
    return "".join(lines)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        pairs = [(f"{prefix}.{name}" if prefix else name, value) for name, value in tree.items()]
        return [leaf for name, value in pairs for leaf in _flatten(value, name)]
    if isinstance(tree, list | tuple) and tree and isinstance(tree[0], dict):
        return [leaf for i, value in enumerate(tree) for leaf in _flatten(value, f"{prefix}[{i}]")]
    return [(prefix, tree)]
