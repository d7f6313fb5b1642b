"""Variants: a policy of the router, the view it has, and whether prompts in flight count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from kvatlas.router.placement.candidate import EVICTION_PREMIUM_MAX
from kvatlas.router.placement.policies import Policy
from kvatlas.router.simulation.other_router import MakeRouter

ViewName = Literal["truth", "rules", "blind"]


class HoldSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The router holds requests while every engine has more than ``hold_s`` seconds of prompts queued."""

    hold_s: float
    ageing: float = 0.0
    """Order: arrival time plus this multiple of the request's own work."""
    siblings: float | None = None
    """Share of its prompt that a request must share with one in flight not to be held."""
    credit: float = 0.0
    """Most work that a tenant may save up, in seconds of the fleet's computation."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """``policy``: a name of ``kvatlas.router.placement.policies``, or a policy of its own; ``settings``:
    overrides of the policy's own, by name; ``hold`` None: every request goes to an engine immediately."""

    policy: str | Policy
    view: ViewName
    in_flight: bool = True
    by_session: bool = False
    tiers: bool = True
    """With view ``truth``: whether it includes the memory outside the GPUs."""
    evictions: bool = True
    """With prompts in flight: whether hits are lowered by the evictions ahead of a prompt's turn."""
    settings: tuple[tuple[str, float], ...] = ()
    hold: HoldSetup | None = None
    prefill: int = 0
    """Number of engines that compute prompts for the others, which decode; 0: all engines do both."""
    pulls: bool = False
    """Whether prefixes are pulled from other engines' host memory, if the fleet has links for that."""
    other: MakeRouter | None = None
    """Another router, which chooses instead of ``policy``."""
    predicts: bool = False
    """Whether that router predicts first tokens, so that ``slo_s`` and ``refuses`` mean something to it."""
    admit_s: float = math.inf
    """Requests whose predicted wait is longer at every engine are refused."""
    slo_s: float = math.inf
    """Target for the first token: engines predicted to miss it are skipped while others are not."""
    refuses: int = 0
    """1: requests predicted to miss ``slo_s`` by their wait are refused, 2: and those that miss it with their
    own prefill (``policy.slo_refuse``)."""
    what: str


# Name of each parameter among the policy's settings, and its maximum.
_KNOBS = {
    "beta": ("beta", 1.0),
    "premium": ("eviction_premium", EVICTION_PREMIUM_MAX),
    "sequence": ("sequence_s", 10.0),
    "scarcity": ("scarcity_premium", EVICTION_PREMIUM_MAX),
    "spread": ("spread", 10.0),
    "room": ("room_share", 1.0),
    "delay": ("delay", 100.0),
    "priority": ("engine_priority", 100.0),
}
_COUNTS = {"prefill": 1023.0, "pull": 1.0}
_ADMIT = {"admit": 600.0, "slo": 600.0, "refuse": 2.0}
_HOLD_KNOBS = {"hold": 60.0, "ageing": 100.0, "siblings": 1.0, "credit": 60.0}


def _blind(policy: str, what: str) -> Variant:
    """Return a variant without knowledge of caches, which does not count prompts in flight."""
    return Variant(policy=policy, view="blind", in_flight=False, what=what)


VARIANTS: dict[str, Variant] = {
    "kvatlas": Variant(
        policy="kvatlas", view="truth", pulls=True, what="place by shared prefix, account by the exact hit"
    ),
    "gpu-only": Variant(
        policy="kvatlas", view="truth", tiers=False, what="kvatlas without the state of memory outside GPUs"
    ),
    "rules": Variant(policy="kvatlas", view="rules", what="no events: shadow pools with the engine's rules"),
    "session-hash": Variant(
        policy="hash", view="blind", in_flight=False, by_session=True, what="sessions hashed, bounded load"
    ),
    "hash": _blind("hash", "first blocks hashed, bounded load"),
    "least-load": _blind("least-load", "shortest queue"),
    "round-robin": _blind("round-robin", "in turn"),
}


def variants_of(names: Iterable[str], known: Mapping[str, Variant] = VARIANTS) -> dict[str, Variant]:
    """Return variants by name, in the given order. ``kvatlas:beta=0.5+premium=0`` sets these parameters,
    ``kvatlas:hold=1+ageing=2+siblings=0.5+credit=2`` those of ``HoldSetup``, ``kvatlas:prefill=2`` the number
    of prefill engines. Raises ``ValueError``."""
    found: dict[str, Variant] = {}
    for name in names:
        base, _, knob = name.partition(":")
        variant = known.get(base)
        if variant is None:
            raise ValueError(f"unknown policy {base!r}; expected one of {', '.join(known)}")
        if knob and variant.other is not None and not (variant.predicts and knob.startswith("slo=")):
            raise ValueError(f"{name}: {base} is another router with its own defaults; it has no parameters")
        if knob:
            variant = _set(variant, name, knob)
        found[name] = variant
    return found


def _set(variant: Variant, name: str, knobs: str) -> Variant:
    """Apply the parameters after the colon: ``beta=0.5+premium=0``."""
    limits = {key: most for key, (_, most) in _KNOBS.items()} | _HOLD_KNOBS | _COUNTS | _ADMIT
    values: dict[str, float] = {}
    for knob in knobs.split("+"):
        key, _, text = knob.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= limits.get(key, -1.0):
            allowed = ", ".join(f"{one}=0 to {one}={high:g}" for one, high in limits.items())
            raise ValueError(f"{name}: after the colon, expected {allowed}; separate several with +")
        values[key] = value
    if "prefill" in values:
        variant = msgspec.structs.replace(variant, prefill=int(values.pop("prefill")))
    if "pull" in values:
        if not variant.pulls:
            raise ValueError(f"{name}: only kvatlas pulls prefixes, so only it takes pull=")
        variant = msgspec.structs.replace(variant, pulls=values.pop("pull") > 0)
    if "refuse" in values and "slo" not in values:
        raise ValueError(f"{name}: refuse= needs slo=SECONDS beside")
    variant = msgspec.structs.replace(
        variant,
        admit_s=values.pop("admit", variant.admit_s),
        slo_s=values.pop("slo", variant.slo_s),
        refuses=int(values.pop("refuse", 0.0)),
    )
    held = {key: values.pop(key) for key in _HOLD_KNOBS if key in values}
    if held and "hold" not in held:
        raise ValueError(f"{name}: {' and '.join(held)} need hold=SECONDS as well")
    if held:
        variant = msgspec.structs.replace(variant, hold=HoldSetup(hold_s=held.pop("hold"), **held))
    if variant.hold is not None and variant.prefill:
        raise ValueError(f"{name}: hold= needs engines without roles; leave out prefill=")
    return msgspec.structs.replace(
        variant, settings=tuple((_KNOBS[key][0], value) for key, value in values.items())
    )
