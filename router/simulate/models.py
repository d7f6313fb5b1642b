"""The cache layouts a simulation knows by name, and those a file describes. Sizes in tokens.

Pages are counted as vLLM counts them: a block of any group takes one page of the pool, whatever the group.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from publisher.groups import GroupSpec

BLOCK_TOKENS = 64
"""Fine enough for vLLM's own boundaries (16 to 64 on GPUs), and an eighth of Mooncake's unit."""


class ModelError(ValueError):
    """A layout that cannot be simulated."""


def _full(block: int) -> tuple[GroupSpec, ...]:
    return (GroupSpec(0, "full_attention", block),)


def _gpt_oss(block: int) -> tuple[GroupSpec, ...]:
    """Every other layer sees 128 tokens."""
    return (GroupSpec(0, "full_attention", block), GroupSpec(1, "sliding_window", block, sliding_window=128))


def _gemma3(block: int) -> tuple[GroupSpec, ...]:
    """Five of six layers see 1,024 tokens."""
    windows = [GroupSpec(i, "sliding_window", block, sliding_window=1024) for i in range(5)]
    return (*windows, GroupSpec(5, "full_attention", block))


def _mamba_hybrid(block: int) -> tuple[GroupSpec, ...]:
    """Three of four layers keep a state; their blocks, and the full group's, are eight times as long."""
    states = [GroupSpec(i, "mamba", 8 * block, mamba_cache_mode="align") for i in range(1, 4)]
    return (GroupSpec(0, "full_attention", 8 * block), *states)


MODELS = {"full": _full, "gpt-oss-like": _gpt_oss, "gemma3-like": _gemma3, "mamba-hybrid": _mamba_hybrid}


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file: ``{"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}, ..]}``."""

    groups: list[GroupSpec]


def groups_of(model: str, block_tokens: int = BLOCK_TOKENS) -> tuple[GroupSpec, ...]:
    """The groups of a named layout, or of a file's. Raises ``ModelError``."""
    make = MODELS.get(model)
    groups = _of_file(Path(model)) if make is None else make(block_tokens)
    for group in groups:
        if group.block_size < 1:
            raise ModelError(f"group {group.group_idx}: block_size = {group.block_size}: expected at least 1")
    return groups


def check_units(groups: tuple[GroupSpec, ...], unit_tokens: int) -> None:
    """Raises ``ModelError`` for blocks that a workload with so many tokens per id cannot tell apart."""
    for group in groups:
        if unit_tokens % group.block_size and group.block_size % unit_tokens:
            raise ModelError(
                f"group {group.group_idx}: block_size = {group.block_size}; a workload tells tokens apart in "
                f"units of {unit_tokens}, so a block must divide that or be a multiple of it"
            )


def _of_file(path: Path) -> tuple[GroupSpec, ...]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ModelFile).groups
    except FileNotFoundError:
        raise ModelError(f"{path}: neither a file nor one of {', '.join(MODELS)}") from None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not found:
        raise ModelError(f"{path}: groups: expected at least one")
    return tuple(found)
