"""Candidates by their numbers, as tests say them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.router.placement.candidate import Candidate, Hit

_OF_HIT = {name: name for name in Hit.__struct_fields__} | {"hit_tokens": "gpu_tokens"}


def make_candidate(engine_id: str, **fields: Any) -> Candidate:
    """``hit_tokens`` and the other parts of the hit beside those of the engine."""
    hit = Hit(**{_OF_HIT[name]: fields.pop(name) for name in list(fields) if name in _OF_HIT})
    return Candidate(engine_id, hit, **fields)


def changed(known: Candidate, **fields: Any) -> Candidate:
    """The same with other numbers."""
    parts = {_OF_HIT[name]: fields.pop(name) for name in list(fields) if name in _OF_HIT}
    return msgspec.structs.replace(known, hit=msgspec.structs.replace(known.hit, **parts), **fields)
