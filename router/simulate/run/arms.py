"""The policies of a simulation: a policy of the router, what it sees, and whether prompts in flight count.

The policies are those that serve (``router.placement.policies``), unchanged; an arm only says what they are
told.
The honest versions of what other routers do are here: full attention only, own history uncapped and capped,
hash of the session with bounded load, power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from router.placement.candidate import EVICTION_PREMIUM_MAX

ViewName = Literal["truth", "history", "capped-history", "rules", "blind"]


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """``policy`` is a name of ``router.placement.policies``; ``beta`` and ``premium`` None leave the settings
    as they are."""

    policy: str
    view: ViewName
    in_flight: bool = True
    by_session: bool = False
    tiers: bool = True
    """With view ``truth``: whether it sees the memory outside the GPUs too."""
    beta: float | None = None
    premium: float | None = None
    what: str


_KNOBS = {"beta": 1.0, "premium": EVICTION_PREMIUM_MAX}

ARMS: dict[str, Arm] = {
    "kvatlas": Arm(policy="kvatlas", view="truth", what="place by trunk, account by the exact hit"),
    "exact": Arm(policy="exact", view="truth", in_flight=False, what="cheapest by the exact hit alone"),
    "full-attention": Arm(
        policy="full-attention",
        view="truth",
        in_flight=False,
        what="the full-attention prefix taken for the hit",
    ),
    "full-attention-in-flight": Arm(
        policy="full-attention", view="truth", what="the same, and prompts in flight count"
    ),
    "gpu-only": Arm(
        policy="kvatlas", view="truth", tiers=False, what="kvatlas that is not told what lies outside GPUs"
    ),
    "rules": Arm(policy="kvatlas", view="rules", what="no events: shadow pools with the engine's rules"),
    "approx-tree": Arm(
        policy="exact", view="history", in_flight=False, what="own prefix history that never forgets"
    ),
    "approx-tree-capped": Arm(
        policy="exact",
        view="capped-history",
        in_flight=False,
        what="own prefix history with the engine's size",
    ),
    "session-hash": Arm(
        policy="hash", view="blind", in_flight=False, by_session=True, what="sessions hashed, bounded load"
    ),
    "hash": Arm(policy="hash", view="blind", in_flight=False, what="first blocks hashed, bounded load"),
    "power-of-two": Arm(
        policy="power-of-two", view="blind", in_flight=False, what="less loaded of two at random"
    ),
    "least-load": Arm(policy="least-load", view="blind", in_flight=False, what="shortest queue"),
    "round-robin": Arm(policy="round-robin", view="blind", in_flight=False, what="in turn"),
}


def arms_of(names: Iterable[str]) -> dict[str, Arm]:
    """Arms by name, in the given order; ``kvatlas:beta=0.5+premium=0`` sets these knobs. Raises
    ``ValueError``."""
    found: dict[str, Arm] = {}
    for name in names:
        base, _, knob = name.partition(":")
        arm = ARMS.get(base)
        if arm is None:
            raise ValueError(f"no policy is called {base!r}; there are {', '.join(ARMS)}")
        if knob:
            arm = _set(arm, name, knob)
        found[name] = arm
    return found


def _set(arm: Arm, name: str, knobs: str) -> Arm:
    """With what stands after the colon: ``beta=0.5+premium=0``."""
    for knob in knobs.split("+"):
        key, _, text = knob.partition("=")
        most = _KNOBS.get(key, -1.0)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            allowed = ", ".join(f"{one}=0 to {one}={high:g}" for one, high in _KNOBS.items())
            raise ValueError(f"{name}: after the colon only {allowed} can be said, several with +")
        arm = msgspec.structs.replace(arm, **{key: value})
    return arm
