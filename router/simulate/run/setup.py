"""What one run of a simulated fleet is given."""

from __future__ import annotations

import msgspec

from publisher.groups import GroupSpec
from router.pd.settings import PdSettings
from router.placement.candidate import PolicySettings
from router.simulate.run.tier_setup import TierSetup
from router.simulate.timing import Timing


class FleetSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. ``num_blocks``: pages of each engine's pool; ``retention`` None is dense."""

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    engines: int = 8
    retention: int | None = 0
    timing: Timing = Timing()
    speed: float = 1.0
    """Arrivals come so many times as fast as the workload says."""
    closed: bool = False
    """A turn waits for the answer before it; else every request comes at its recorded time."""
    seed: int = 0
    gauge_s: float = 2.0
    """Seconds between two looks at every engine's gauges, as ``fleet.poll_interval_s`` of a router."""
    learn_rates: bool = False
    """Learn each engine's prefill rate as the router does; else every arm is told the true one. Learning from
    wrong predictions misleads an arm about load as well, so with it on arms differ in two things at once."""
    policy: PolicySettings = PolicySettings()
    tiers: TierSetup | None = None
    """Memory outside the GPUs. Arms that see it are told what loads take."""
    pd: PdSettings = PdSettings()
    """What transfers take, for arms that have prefill and decode apart."""
