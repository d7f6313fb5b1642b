"""Checks of caches by events and metrics: hashes, groups, retention, and engines that should be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

from kvatlas.publisher.block_hash import DEFAULT_SEED, SGLANG, HashScheme
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.fleet.statement import EVENTS_OPTION, EngineStatement
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.hash_scheme import SEEDS_MAX, Detection
from kvatlas.router.index.places import GPU
from kvatlas.router.prompts.model_config import ModelConfigFile
from kvatlas.router.tools.doctor.event_counts import GroupStores
from kvatlas.router.tools.doctor.evidence import EngineEvidence, Evidence
from kvatlas.router.tools.doctor.findings import CheckResult, check, error, info, ok, warning
from kvatlas.router.tools.doctor.missing_features import FIXED_SEED_SINCE

# Fewer stored events of a group are no evidence about retention.
_STORES_MIN = 20
_SMALL_WINDOW_TOKENS = 256


@check("cache.prefix_caching")
def prefix_caching(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that prefix caching is on: without it there are no hits."""
    reported = engine.gauges.cache_config.get("enable_prefix_caching")
    if reported == "False":
        yield error(
            "enable_prefix_caching is off (according to /metrics)",
            "--no-enable-prefix-caching, or a model for which vLLM disables it",
            "start the engine with --enable-prefix-caching",
        )
    elif reported is not None:
        yield ok("prefix caching is on")


@check("cache.scheme")
def scheme(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report how the engine hashes blocks."""
    residency = engine.residency
    if residency is None or not engine.event_counts.stored:
        return
    found = residency.scheme
    if residency.detection is Detection.NATIVE and found is not None and found.algo == SGLANG:
        yield ok(f"SGLang's page hashes, {found.hash_block_size} token(s) per page")
    elif residency.detection is Detection.LEARNED and engine.kind == "sglang":
        yield ok("hashes are learned from events: they cover adapters, or have Dynamo's format")
    elif residency.detection is Detection.NATIVE and found is not None:
        seed = "vLLM's fixed default seed" if found.seed == DEFAULT_SEED else f"PYTHONHASHSEED={found.seed}"
        yield ok(f"{found.algo}, {seed}, {found.hash_block_size} tokens per hash")
        if found.algo.startswith("xxhash") and found.seed == DEFAULT_SEED:
            yield info("xxhash is not collision resistant", "prefix_caching_hash_algo of the engine")
    elif residency.detection is Detection.LEARNED:
        yield warning(
            "the hash scheme was not found; hashes are learned from events instead",
            _why_no_scheme(engine),
            "set PYTHONHASHSEED to the same value for all engines (and name it in models.NAME.hash_seeds "
            f"unless it is a number below {SEEDS_MAX})",
        )
    elif residency.assumed is not None:
        guess = residency.assumed
        yield info(
            f"the hash scheme is only assumed so far: {guess.algo}, seed {guess.seed}",
            "no event contains a prompt from its first token; until one matches, predictions may be too low",
            "send a prompt twice (--probe does): the blocks it leaves prove the scheme",
        )
    else:
        yield info(
            f"the hash scheme is not known yet ({residency.detection})",
            "no event with the first tokens of a prompt and their hashes has arrived yet",
            "try --probe, or listen longer with --seconds",
        )
    if residency.scheme_mismatches:
        yield warning(
            f"{residency.scheme_mismatches} prompt(s) hashed differently from the others",
            "the engine restarted with another seed, or several engines publish to one address",
            "give every engine its own address and the same PYTHONHASHSEED",
        )


@check("cache.sglang")
def sglang(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check the options with which SGLang was started."""
    stated = engine.server.server_info
    if engine.kind != "sglang" or not engine.server.models:
        return
    if stated is None or stated.kind != "sglang":
        yield warning(
            "GET /server_info: no statement of SGLang",
            "a proxy in front of it, or a release before 0.5.23",
            "give events= and replay= with --engine, or upgrade",
        )
        return
    found = list(_sglang_options(engine, stated))
    yield from found or [ok(f"SGLang {stated.version}, {stated.attention_block_size} tokens per page")]


def _sglang_options(engine: EngineEvidence, stated: EngineStatement) -> Iterator[CheckResult]:
    if stated.event_ports is None and engine.engine.events is None:
        yield warning(
            "the engine publishes no events",
            "it was started without --kv-events-config",
            f"start it with {EVENTS_OPTION['sglang']}; else its cache is estimated",
        )
    if stated.attention_block_size == 1:
        yield warning(
            "a page holds 1 token",
            "SGLang's default: every token is a block, which costs memory and events",
            "start it with --page-size 16 or 64",
        )
    if not engine.server.metrics_answer.ok:
        yield warning(
            f"GET /metrics: {engine.server.metrics_answer.description}",
            "it was started without --enable-metrics",
            "start it with --enable-metrics: without it the load of other clients is not known",
        )
    if not stated.reports_cached_tokens:
        yield warning(
            "answers do not report cached tokens",
            "it was started without --enable-cache-report",
            "start it with --enable-cache-report: without it there are no receipts",
        )
    if stated.other_attention:
        yield warning(
            "it has pools for windows or Mamba states",
            "SGLang's events say nothing of them",
            "nothing: they are followed by SGLang's rules and by receipts, and may be wrong (mode partial)",
        )
    if stated.silent_store:
        yield warning(
            f"it has a store beyond host memory ({stated.silent_store})",
            "SGLang's events say nothing of it",
            "nothing: hits there are not predicted, so predictions may be too low (mode partial)",
        )


def _why_no_scheme(engine: EngineEvidence) -> str:
    algo = engine.gauges.cache_config.get("prefix_caching_hash_algo", "")
    version = engine.server.version
    if algo.startswith("xxhash"):
        return f"{algo} has a random seed unless PYTHONHASHSEED is set"
    if version is not None and version < FIXED_SEED_SINCE:
        return f"vLLM {engine.server.version_text} has a random seed unless PYTHONHASHSEED is set"
    return "PYTHONHASHSEED has a value that was not tried, or the hash function is not vLLM's"


@check("cache.groups")
def groups(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report the KV cache layout that hits are computed with."""
    residency = engine.residency
    layout = residency.layout if residency is not None else None
    if residency is None or layout is None:
        return
    shown = "; ".join(f"{len(c.group_idxs)} x {c.label}" for c in layout.classes)
    yield ok(f"{len(layout.groups)} group(s): {shown}; a hit is a multiple of {layout.alignment} tokens")
    file = engine.model_file
    if engine.kind == "sglang":
        return  # its events name neither group nor kind; ``sglang`` reports others than full attention
    if residency.assumed_kinds:
        yield _assumed(sorted(residency.assumed_kinds), file, len(layout.groups))
    elif other := file.other_windows(layout.groups):
        yield warning(
            f"sliding window of {other} tokens; config.json says {file.sliding_window}",
            "the engine was started with another revision or --hf-overrides; what its events say is used",
            "nothing, if this is intended; otherwise start engines and router with the same revision",
        )
    if (
        engine.event_counts.without_group
        and len(layout.groups) == 1
        and engine.event_counts.without_group > 0
    ):
        yield info(
            "events name no group",
            "vLLM before 0.20, or another publisher",
            "predictions are right only if the model has a single group",
        )


def _assumed(idxs: list[int], file: ModelConfigFile, groups: int) -> CheckResult:
    """Report groups whose kind no event names."""
    kinds = file.group_kinds(groups)
    if kinds:
        window = "" if file.sliding_window is None else f", window {file.sliding_window}"
        return info(
            f"kind of group(s) {idxs} by config.json: {', '.join(kinds)}{window}",
            "events of this vLLM do not carry the kind; the layers form as many groups as the events show",
            "nothing, or set models.NAME.kinds and models.NAME.windows",
        )
    unlike = "; the layers of config.json form a different number of groups" if file.layer_kinds else ""
    return warning(
        f"kind of group(s) {idxs} taken for full attention",
        f"events of this vLLM do not carry the kind{unlike}",
        "set models.NAME.kinds and models.NAME.windows, or upgrade to 0.22 or later",
    )


@check("cache.facts")
def facts(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report missing facts that no event carries and that must be configured."""
    residency = engine.residency
    layout = residency.layout if residency is not None else None
    if layout is None:
        return
    for name in layout.missing_facts:
        yield error(
            f"{name} is not known: no hit can be predicted",
            "no event carries it",
            f"set models.NAME.{name} (the model's config.json has it)",
        )
    yield from _mamba(engine, layout.groups)
    yield from _drafter(engine, residency)


@check("cache.sources")
def sources(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report the facts about the engine with their sources."""
    residency = engine.residency
    if residency is None or residency.layout is None:
        return
    for fact in residency.found_facts:
        source = "no source" if fact.source == "none" else fact.source
        yield ok(f"{fact.name} = {msgspec.json.encode(fact.value).decode()} ({source}, {fact.certainty})")


def _drafter(engine: EngineEvidence, residency: EngineResidency | None) -> Iterator[CheckResult]:
    """Report when the lookups' drafter behaviour (dropping a block or not) is only assumed."""
    if not engine.gauges.speculates or engine.event_counts.lookahead or residency is None:
        return
    fact = next((f for f in residency.found_facts if f.name == "eagle_groups"), None)
    if fact is None or fact.certainty not in {"assumed", "disputed"}:
        return
    yield info(
        "the engine decodes speculatively, and its method is not known; lookups are assumed to drop the last "
        f"block of {'all groups' if fact.value == 'all' else f'groups {list(fact.value)}'}",
        "its hashes do not look ahead (vLLM before 0.33, or one with a KV connector); EAGLE, EAGLE3 and "
        "DFlash drop a block of all groups, MTP of the last layer's, n-gram and suffix of none",
        "nothing: receipts show which (/kvatlas/engines of a running router); VLLM_SERVER_DEV_MODE=1 at the "
        'engine, or models.NAME.eagle_groups ("all", [] or numbers of groups), would state it immediately',
    )


def _mamba(engine: EngineEvidence, specs: tuple[GroupSpec, ...]) -> Iterator[CheckResult]:
    if not any(spec.family is Family.MAMBA for spec in specs):
        return
    configured = engine.model_config.mamba_cache_mode
    reported = engine.gauges.cache_config.get("mamba_cache_mode")
    if configured is None and reported not in {"align", "all"}:
        yield warning(
            "the model has Mamba groups and mamba_cache_mode is not set",
            "no event carries it; with align, hits may end inside a block",
            "set models.NAME.mamba_cache_mode as the engine uses it",
        )
    elif configured is not None and reported not in {None, "none", configured}:
        yield warning(
            f"mamba_cache_mode: the engine says {reported!r}, the configuration {configured!r}",
            "the configuration is not that of this engine",
            f'set models.NAME.mamba_cache_mode = "{reported}"',
        )


@check("cache.retention")
def retention(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Report how much of a prompt window and Mamba groups keep, and the effect on hits."""
    layout = engine.residency.layout if engine.residency is not None else None
    if layout is None:
        return
    partial = [g.group_idx for g in layout.groups if g.family in {Family.WINDOW, Family.MAMBA}]
    if not partial:
        return
    stores = [engine.event_counts.groups.get(idx, GroupStores()) for idx in partial]
    full, masked, empty = (sum(getattr(s, n) for s in stores) for n in ("full", "masked", "empty"))
    total = full + masked + empty
    reported = engine.gauges.cache_config.get("prefix_cache_retention_interval")
    configured = engine.model_config.retention_interval
    # Without a setting the router uses what the engine reports.
    wanted = reported if configured is None else "None" if configured == "dense" else str(configured)
    seen = (
        f"window and Mamba groups stored {full} spans completely, {masked} partially, {empty} without a block"
    )
    if reported is not None and reported != wanted:
        value = '"dense"' if reported == "None" else reported
        yield warning(
            f"the engine's retention interval is {reported}, the configuration says {configured}",
            "prompts in flight are predicted with the configured value",
            f"set models.NAME.retention_interval = {value}",
        )
    elif reported is None and total >= _STORES_MIN and not masked and not empty and configured != "dense":
        yield warning(
            f"{seen}: the engine seems to keep everything, the configuration says {configured or 0}",
            "vLLM before 0.29 keeps everything by default",
            'set models.NAME.retention_interval = "dense"',
        )
    elif (empty or masked) and _may_gain_by_retention(layout.groups):
        yield info(
            seen,
            f"retention interval {wanted or 0}: these groups keep few blocks of a prompt, and generated "
            "tokens are not reused",
            "try --prefix-cache-retention-interval 1024 to 4096 on your load and compare hit shares "
            "(docs/operations.md); kvatlas advise tries it on recorded traffic",
        )
    elif total:
        yield ok(seen)


def _may_gain_by_retention(groups: Sequence[GroupSpec]) -> bool:
    """Whether a retention interval may help: small windows are cheap to keep; large ones do better with
    vLLM's default (measured in docs/operations.md).
    """
    windows = [group.sliding_window or 0 for group in groups if group.family is Family.WINDOW]
    return max(windows, default=0) <= _SMALL_WINDOW_TOKENS


# Beyond what one block of a plain model holds (16 to 128 tokens); Qwen3-Next with EAGLE3 has 1,120.
_LARGE_ALIGNMENT_TOKENS = 512


@check("cache.block_size")
def block_size(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that prompts are longer than a block: shorter ones are never reused."""
    layout = engine.residency.layout if engine.residency is not None else None
    if layout is None:
        return
    mean = engine.gauges.mean_prompt_tokens
    seen = f"a hit is a multiple of {layout.alignment} tokens"
    if mean is None or engine.gauges.requests < 10:
        if layout.alignment >= _LARGE_ALIGNMENT_TOKENS:
            yield info(
                f"{seen}: prompts of up to {layout.alignment} tokens never hit",
                "the block sizes of its groups have a large common multiple (Mamba groups, a drafter)",
                "nothing, if prompts are longer; otherwise try other block sizes, or without the drafter",
            )
        return
    seen += f"; prompts have {mean:.0f} on average"
    if layout.alignment > mean:
        yield warning(
            seen,
            f"prompts of up to {layout.alignment} tokens never hit, and most are no longer",
            "start the engine with a smaller --block-size (CPU engines default to 128)",
        )
    elif layout.alignment * 4 > mean:
        yield info(seen, "a quarter of a prompt or more is lost to rounding", "try a smaller --block-size")
    else:
        yield ok(seen)


@check("cache.pool")
def pool(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that an engine does not hold more blocks than its pool has."""
    residency, blocks = engine.residency, engine.gauges.pool_blocks
    if residency is None or blocks is None or not engine.event_counts.stored:
        return
    held = residency.index.physical(engine.engine_id, GPU)
    seen = f"according to its events it holds {held} of its {blocks} blocks"
    if residency.layout is not None and residency.layout.has_parts:
        yield ok(f"{seen}; a block may be stored under several hashes")
    elif held > blocks:
        yield error(
            seen,
            "removals are not published, stores are published twice (kv_cache_report_mode=full), or several "
            "engines publish to one address",
            "let the engine publish one removal for each copy of a block; give every engine its own address",
        )
    else:
        yield ok(seen)


@check("cache.lora")
def lora(engine: EngineEvidence) -> Iterator[CheckResult]:
    """Check that the path of every LoRA adapter is known: it is part of the block hashes."""
    served = {card.id for card in engine.server.models if card.parent is not None}
    unknown = sorted((served | engine.event_counts.lora_names) - set(engine.lora_paths))
    if unknown:
        yield warning(
            f"unknown path of adapter(s) {', '.join(unknown[:8])}",
            "/v1/models does not name it, and block hashes cover it (vLLM 0.31 and later)",
            "set models.NAME.lora_paths: without it, prompts for these adapters cannot be predicted",
        )
    elif served:
        yield ok(f"paths of all {len(served)} adapter(s) known")


def _by_model(seen: Evidence) -> dict[str, list[EngineEvidence]]:
    models: dict[str, list[EngineEvidence]] = defaultdict(list)
    for engine in seen.engines:
        if engine.base_model is not None:
            models[engine.base_model].append(engine)
    return models


@check("fleet.engines")
def engines(seen: Evidence) -> Iterator[CheckResult]:
    """Check that there is an engine to examine."""
    if not seen.engines and (seen.router is None or seen.router.engines is not None):
        yield error(
            "no engine to examine",
            "the router names none, or its response was not understood",
            "give --engine URL",
        )


@check("fleet.duplicates")
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


@check("fleet.hash_seeds")
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


@check("fleet.lookahead")
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


@check("fleet.layouts")
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


@check("fleet.versions")
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
