"""Cache layouts known by name, and those in a file. Sizes in tokens.

Pages are counted as in vLLM: a block of any group takes one page of the pool, whatever the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.simulator.settings import full_attention, gemma3_like, gptoss_like, mamba_hybrid
from kvatlas.router.simulation.requests import Request

POOL_BLOCKS_MIN = 64


def pool_blocks(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], engines: int, share: float
) -> int:
    """Return the pages of each engine so that the fleet's pools hold ``share`` of what the workload's prompts
    and answers would fill if each was kept once, in the full-attention group (else the group with the
    smallest blocks)."""
    units = {identifier for request in requests for identifier in request.ids}
    unit_tokens = requests[0].unit_tokens
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(POOL_BLOCKS_MIN, int(share * len(units) * unit_tokens / min(sizes) / engines))


# Divides vLLM's own block sizes (16 to 64 on GPUs), and is an eighth of Mooncake's unit.
BLOCK_TOKENS = 64


class ModelError(ValueError):
    """A layout that cannot be simulated."""


MODELS: dict[str, Callable[[int], tuple[GroupSpec, ...]]] = {
    "full": full_attention,
    "gpt-oss-like": gptoss_like,
    "gemma3-like": partial(gemma3_like, window=1024),
    # Blocks with a state are longer than others: eight times is usual.
    "mamba-hybrid": lambda block: mamba_hybrid(8 * block),
}


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file: ``{"groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}, ..]}``."""

    groups: list[GroupSpec]


def groups_of(model: str, block_tokens: int = BLOCK_TOKENS) -> tuple[GroupSpec, ...]:
    """Return the groups of a named layout, or of a file's. Raises ``ModelError``."""
    make = MODELS.get(model)
    groups = _of_file(Path(model)) if make is None else make(block_tokens)
    for group in groups:
        if group.block_size < 1:
            raise ModelError(f"group {group.group_idx}: block_size = {group.block_size}: expected at least 1")
    return groups


def check_units(groups: tuple[GroupSpec, ...], unit_tokens: int) -> None:
    """Check the block size.

    Raises ``ModelError`` if a workload with several tokens per id cannot represent it.
    """
    for group in groups:
        if unit_tokens % group.block_size and group.block_size % unit_tokens:
            raise ModelError(
                f"group {group.group_idx}: block_size = {group.block_size}; a workload identifies tokens in "
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
