"""Choices of a simulated fleet's router on recorded-like loads: which engine each request goes to, and the
hit predicted there.

    python -m benchmarks.choices [--tree CHECKOUT] [--loads chat agents ...] [--layouts full mla ...]
        [--scenes few many ...] [--requests 80] [--write]

A change of the decision that should not change choices leaves all of them as they were.
``tests/router/simulation/choices.json`` has digests of the runs in ``COMPARED``, which a test compares;
``--write`` writes it again. With ``--tree`` the runs are those of another checkout as well, and the first
differing requests are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.layouts import LAYOUTS
from kvatlas.publisher.groups import hash_unit
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.requests import continued
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.tiers import TierSetup, block_bytes, read_host, read_store
from kvatlas.router.simulation.variants import VARIANTS, variants_of
from kvatlas.router.simulation.workload import GENERATORS

HERE: Final = Path(__file__).resolve().parent.parent
DIGESTS: Final = HERE / "tests/router/simulation/choices.json"
LOADS: Final = ("chat", "agents", "documents", "tenants")
REQUESTS: Final = 80
_TOKENS_OF_POOL: Final = 120_000
_KV_KIB: Final = 64.0


class Scene(NamedTuple):
    """Differences between runs beside load and layout. ``requests_per_s``: of the whole fleet."""

    engines: int
    requests_per_s: float
    variant: str = "kvatlas"
    tiers: bool = False
    setup: Mapping[str, Any] = {}


SCENES: Final[dict[str, Scene]] = {
    "few": Scene(3, 2.0),
    "many": Scene(40, 24.0),
    "one": Scene(1, 0.4),
    "crowded": Scene(4, 6.0, "kvatlas:priority=2"),
    "shadows": Scene(4, 2.5, "rules", setup={"learn_rates": True}),
    "tiers": Scene(4, 4.0, tiers=True),
    "levels": Scene(4, 3.0, "kvatlas:slo=2+refuse=2"),
    "roles": Scene(6, 3.0, "kvatlas:prefill=2"),
    "least-load": Scene(4, 3.0, "least-load"),
}
"""Small, large and single fleets; more work than they can do, in the engines' own order; engines without
events whose rates are learned; memory outside the GPUs and pulls; service levels; prefill engines."""

COMPARED: Final = [
    f"{LOADS[(number + at) % len(LOADS)]} {layout} {scene}"
    for number, layout in enumerate(LAYOUTS)
    for at, scene in enumerate(SCENES)
]
"""A quarter of all runs, in which each two of load, layout and scene meet."""

Choices = list[tuple[int, int]]
"""Engine and predicted tokens of each request."""


def choices(load: str, layout: str, scene: Scene, count: int = REQUESTS) -> Choices:
    """Play a load, and return what was chosen."""
    groups = LAYOUTS[layout].groups
    blocks = _TOKENS_OF_POOL * len(groups) // hash_unit(groups)
    size = block_bytes(groups, _KV_KIB)
    tiers = TierSetup(
        block_bytes=size,
        host=read_host("200%", blocks, size),
        store=read_store("400%", scene.engines * blocks, size),
        pull_bytes_per_s=10e9,
    )
    setup = FleetSetup(
        groups=groups,
        num_blocks=blocks,
        engines=scene.engines,
        timing=Timing(interference_s=0.0005, seqs_max=16),
        tiers=tiers if scene.tiers else None,
        **scene.setup,
    )
    requests = continued(GENERATORS[load](count, count / scene.requests_per_s, 7))
    run = FleetSim(setup, variants_of([scene.variant], VARIANTS)[scene.variant]).run(requests)
    return [(row.engine, row.predicted) for row in run.rows]


def digest(chosen: Choices) -> str:
    """Return a short digest of the choices."""
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]


def _there(tree: Path, words: list[str]) -> dict[str, Choices]:
    """Return the runs of another checkout."""
    command = [sys.executable, __file__, "--dump", *words]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    return {name: [(at, hit) for at, hit in chosen] for name, chosen in json.loads(found.stdout).items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=SCENES)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    found = {
        f"{load} {layout} {scene}": choices(load, layout, SCENES[scene], args.requests)
        for load in args.loads
        for layout in args.layouts
        for scene in args.scenes
    }
    if args.dump:
        print(json.dumps(found))
        return
    digests = {name: digest(chosen) for name, chosen in found.items()}
    if args.write:
        known = json.loads(DIGESTS.read_text()) | {run: digests[run] for run in COMPARED if run in digests}
        DIGESTS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    if args.tree is None:
        print("\n".join(f"{name}: {mark}" for name, mark in digests.items()))
        return
    words = ["--loads", *args.loads, "--layouts", *args.layouts, "--scenes", *args.scenes]
    there = _there(args.tree.resolve(), [*words, "--requests", str(args.requests)])
    for name, chosen in found.items():
        pairs = zip(there[name], chosen, strict=True)
        differ = [(at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]]
        print(f"{name}: {len(differ)} of {len(chosen)} differ", *differ[:3])


if __name__ == "__main__":
    main()
