"""Checks across engines: duplicates, seeds, layouts, and models whose engines disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

from publisher.block_hash import HashScheme
from publisher.events import GroupSpec
from router.index.learn.hash_scheme import Detection
from router.tools.doctor.evidence import EngineEvidence, Evidence
from router.tools.doctor.findings import CheckResult, error, fleet_check, info, ok, warning


def _by_model(seen: Evidence) -> dict[str, list[EngineEvidence]]:
    models: dict[str, list[EngineEvidence]] = defaultdict(list)
    for engine in seen.engines:
        if engine.base_model is not None:
            models[engine.base_model].append(engine)
    return models


@fleet_check("fleet.engines")
def engines(seen: Evidence) -> Iterator[CheckResult]:
    """Check that there is an engine to examine."""
    if not seen.engines:
        yield error(
            "no engine to examine",
            "the router names none, or its response was not understood",
            "give --engine URL",
        )


@fleet_check("fleet.duplicates")
def duplicates(seen: Evidence) -> Iterator[CheckResult]:
    """Report two entries that receive the same messages: one engine counted twice."""
    received = [
        (engine, set(engine.event_counts.digests)) for engine in seen.engines if engine.event_counts.digests
    ]
    for (first, a), (second, b) in combinations(received, 2):
        shared = len(a & b)
        if shared:
            yield error(
                f"{first.engine_id} and {second.engine_id} publish the same {shared} message(s)",
                "two names of one engine, or events= of one given to the other",
                "list each engine once, with its own event address",
            )
    if len(received) > 1 and not any(a & b for (_, a), (_, b) in combinations(received, 2)):
        yield ok(f"{len(received)} engines, each with events of its own")


@fleet_check("fleet.hash_seeds")
def hash_seeds(seen: Evidence) -> Iterator[CheckResult]:
    """Report several hash schemes for one model: every prompt is hashed once per scheme."""
    for model, members in _by_model(seen).items():
        schemes: dict[HashScheme, list[str]] = defaultdict(list)
        for engine in members:
            residency = engine.residency
            if residency is not None and residency.detection is Detection.NATIVE and residency.scheme:
                schemes[residency.scheme].append(engine.engine_id)
        if len(schemes) < 2:
            continue
        seeds = {scheme.seed for scheme in schemes}
        shown = "; ".join(
            f"{', '.join(ids)}: {scheme.algo}, seed {scheme.seed!r}, {scheme.hash_block_size} tokens"
            for scheme, ids in schemes.items()
        )
        yield warning(
            f"{model}: {len(schemes)} hash schemes in use: {shown}",
            "PYTHONHASHSEED differs between engines"
            if len(seeds) > 1
            else "prefix_caching_hash_algo or block sizes differ between engines",
            "start all engines of a model alike: each prompt is hashed once per scheme",
        )


@fleet_check("fleet.lookahead")
def lookahead(seen: Evidence) -> Iterator[CheckResult]:
    """Report engines of one model with and without look-ahead hashes (EAGLE, MTP): they share no blocks."""
    for model, members in _by_model(seen).items():
        found: dict[bool, list[str]] = {True: [], False: []}
        for engine in members:
            if engine.gauges.speculates and engine.event_counts.stored:
                found[bool(engine.event_counts.lookahead)].append(engine.engine_id)
        if found[True] and found[False]:
            yield warning(
                f"{model}: hashes of {', '.join(found[True])} cover the tokens after a block, those of "
                f"{', '.join(found[False])} do not",
                "vLLM hashes so from 0.33 on, but not in engines with a KV connector; a block has a "
                "different "
                "hash in each, so every prompt is hashed twice",
                "give all engines of a model the same vLLM, and connectors to all or none; or set "
                "disable_lookahead_block_hashes in --speculative-config of those that have none",
            )


@fleet_check("fleet.layouts")
def layouts(seen: Evidence) -> Iterator[CheckResult]:
    """Report engines of one model with different KV cache groups."""
    for model, members in _by_model(seen).items():
        found: dict[tuple[GroupSpec, ...], list[str]] = defaultdict(list)
        for engine in members:
            layout = engine.residency.layout if engine.residency is not None else None
            if layout is not None:
                found[layout.groups].append(engine.engine_id)
        if len(found) < 2:
            continue
        shown = "; ".join(
            f"{', '.join(ids)}: {', '.join(f'{g.kind}/{g.block_size}' for g in groups)}"
            for groups, ids in found.items()
        )
        yield warning(
            f"{model}: engines have different cache layouts: {shown}",
            "other block sizes, other vLLM versions, or engines that have not shown all their groups yet",
            "start all engines of a model alike; where they are, repeat with --probe",
        )


@fleet_check("fleet.versions")
def versions(seen: Evidence) -> Iterator[CheckResult]:
    """Report different vLLM releases: supported, but worth knowing."""
    for model, members in _by_model(seen).items():
        texts = sorted({engine.server.version_text for engine in members if engine.server.version_text})
        if len(texts) > 1:
            yield info(
                f"{model}: engines run {', '.join(texts)}",
                "an upgrade in progress?",
                "hashes and retention differ between some releases; see fleet.hash_seeds",
            )
