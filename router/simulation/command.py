"""``kvatlas simulate``: turns flags into a plan, runs it on all cores, and prints a table or JSON."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.simulation.cache_layouts import (
    POOL_BLOCKS_MIN,
    ModelError,
    check_units,
    groups_of,
    pool_blocks,
)
from kvatlas.router.simulation.fetch import fetch
from kvatlas.router.simulation.fit import Fit, FitError, fit_capture, fit_metrics
from kvatlas.router.simulation.options import AdviseOptions, SimulateOptions
from kvatlas.router.simulation.outcome import NothingServedError
from kvatlas.router.simulation.report import facts_of, report_json, show
from kvatlas.router.simulation.requests import WorkloadError
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.study import Plan, Workloads, check_layout, run_plan
from kvatlas.router.simulation.tiers import TierSetup, block_bytes, read_host, read_store
from kvatlas.router.simulation.usage_record import is_capture, read_capture
from kvatlas.router.simulation.variants import Variant, variants_of
from kvatlas.router.simulation.workload import WorkloadSource
from kvatlas.router.tools.ops_client import output_console

ENGINES = 8
ENGINES_MAX = 1024
SEEDS_MAX = 100
SENSITIVITY = (0.8, 1.0, 1.25)


def run_simulate(workload: str, options: SimulateOptions, *, as_json: bool) -> int:
    """Run the simulation; returns the exit status. Raises ``ConfigError`` for unusable options."""
    check_numbers(options, _BOUNDS, _POSITIVE)
    groups = read_model(options.model, options.block_tokens)
    engines = _engines(options)
    variants = _variants(options, engines)
    retentions = read_retentions(options.retention, groups)
    fit = None if options.fit is None else read_fit(options.fit, options.served_model)
    timing = _timing(options, fit)
    with refused("workload", WorkloadError):
        source = WorkloadSource(
            name=workload,
            requests_max=options.requests,
            seconds=options.seconds,
            model=options.served_model,
        )
        workloads = source.draws(range(options.seeds))
    with refused("--model", ModelError):
        check_units(groups, workloads[0][0].unit_tokens)
    blocks = read_pool(options.pool, groups, engines, workloads)
    plan = Plan(
        setup=FleetSetup(
            groups=groups,
            num_blocks=blocks,
            engines=engines,
            timing=timing,
            speed=options.speed or 1.0,
            closed=options.closed,
            tiers=read_tiers(
                options.host_memory,
                options.store,
                options.kv_kib_per_token,
                groups,
                blocks,
                engines,
                pull_gbit_s=options.pull,
            ),
            pd=transfers(options.kv_kib_per_token, options.transfer_gbyte_s),
        ),
        variants=variants,
        retentions=retentions,
        rate_factors=SENSITIVITY if options.sensitivity else (1.0,),
        load=None if options.speed is not None else options.load,
    )
    processes = options.processes or len(os.sched_getaffinity(0))
    total = plan.num_runs(len(workloads)) * len(workloads[0])
    with (
        refused("workload", WorkloadError),
        refused(f"--pool {options.pool}", NothingServedError),
        progress_bar(total, quiet=as_json) as placed,
    ):
        study = run_plan(plan, workloads, processes=processes, placed=placed)
    facts = facts_of(plan, study, workloads, workload=workload, model=options.model, pool=options.pool)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report_json(plan, study, facts, fit)).decode() + "\n")
    else:
        show(plan, study, facts, fit, output_console())
    return 0


def read_model(model: str, block_tokens: int) -> tuple[GroupSpec, ...]:
    """Return the groups of ``--model``. Raises ``ConfigError``."""
    with refused("--model", ModelError):
        groups = groups_of(model, block_tokens)
    with refused(f"--model {model}", ValueError):
        check_layout(groups, None if len(groups) > 1 else 0)
    return groups


def read_retentions(text: str, groups: tuple[GroupSpec, ...]) -> tuple[int | None, ...]:
    """Parse ``0,4096,dense``. Raises ``ConfigError``, also for values that the model does not allow."""
    found: list[int | None] = []
    for word in [part.strip() for part in text.split(",")]:
        if word != "dense" and not word.isdecimal():
            raise ConfigError(f"--retention {word!r}: expected tokens, or dense; several with commas")
        retention = None if word == "dense" else int(word)
        with refused(f"--retention {word}", ValueError):
            check_layout(groups, retention)
        if retention not in found:
            found.append(retention)
    return tuple(found)


def read_pool(text: str, groups: tuple[GroupSpec, ...], engines: int, workloads: Workloads) -> int:
    """Return the blocks of each engine, from ``25%`` or a count. Raises ``ConfigError``."""
    number = text.removesuffix("%").strip()
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        value = -1
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--pool {text!r}: expected blocks per engine, or a share of the workload such as 25%"
        )
    if text.endswith("%"):
        return pool_blocks(workloads[0], groups, engines, value / 100)
    if value < POOL_BLOCKS_MIN:
        raise ConfigError(f"--pool {text}: expected at least {POOL_BLOCKS_MIN} blocks")
    return int(value)


def read_tiers(
    host: str | None,
    store: str | None,
    kv_kib_per_token: float,
    groups: tuple[GroupSpec, ...],
    num_blocks: int,
    engines: int,
    *,
    pull_gbit_s: float | None = None,
) -> TierSetup | None:
    """Parse ``--host-memory``, ``--store`` and ``--pull``; None if none is given. Raises ``ConfigError``."""
    size = block_bytes(groups, kv_kib_per_token)
    found = TierSetup(block_bytes=size)
    if host is not None:
        with refused(f"--host-memory {host}", ValueError):
            found = msgspec.structs.replace(found, host=read_host(host, num_blocks, size))
    if store is not None:
        with refused(f"--store {store}", ValueError):
            found = msgspec.structs.replace(found, store=read_store(store, num_blocks * engines, size))
    if pull_gbit_s is not None:
        with refused(f"--pull {pull_gbit_s:g}", ValueError):
            if found.host is None:
                raise ValueError("engines pull from host memory: add --host-memory, such as 400%")
            found = msgspec.structs.replace(found, pull_bytes_per_s=pull_gbit_s * 1e9 / 8)
    return found if found.any else None


def read_fit(where: str, served_model: str | None) -> Fit:
    """Return rates from ``--fit``: an engine's URL, its saved metrics page, or a capture. Raises
    ``ConfigError``."""
    timing = Timing()
    if not where.startswith(("http://", "https://")) and not Path(where).is_file():
        raise ConfigError(
            f"--fit {where}: no such file; give an engine's URL, its saved metrics page, or a usage record"
        )
    with refused(f"--fit {where}", FitError, WorkloadError, OSError, UnicodeDecodeError):
        if where.startswith(("http://", "https://")):
            return fit_metrics(fetch(where), timing)
        path = Path(where)
        if path.suffix != ".gz" and path.read_text(encoding="utf-8").startswith("#"):
            return fit_metrics(path.read_text(encoding="utf-8"), timing)
        if not is_capture(path):
            raise FitError("a trace has no response times; a usage record, an engine's URL or metrics have")
        return fit_capture(read_capture(path, served_model), timing)


def transfers(kv_kib_per_token: float, gbyte_s: float = 10.0) -> PdSettings:
    """Return the router's own settings, with the transfer times of such a link."""
    return PdSettings(transfer_s_per_token=kv_kib_per_token * 1024 / (gbyte_s * 1e9))


def _engines(options: SimulateOptions) -> int:
    """Return the number of engines. Raises ``ConfigError`` if the flags contradict each other."""
    prefill, decode = options.prefill, options.decode
    if prefill is None and decode is None:
        return options.engines or ENGINES
    if prefill is None or decode is None:
        raise ConfigError("--prefill and --decode go together: how many engines do which")
    if options.engines not in (None, prefill + decode):
        raise ConfigError(f"--engines {options.engines}: --prefill and --decode make {prefill + decode}")
    return prefill + decode


def _variants(options: SimulateOptions, engines: int) -> dict[str, Variant]:
    """Return the requested variants; with ``--prefill``, each of them without and with roles."""
    names = [word.strip() for word in options.policy.split(",")]
    if options.prefill is not None:
        names = [each for name in names for each in (name, _apart(name, options.prefill))]
    with refused("--policy", ValueError):
        variants = variants_of(names)
    for name, variant in variants.items():
        if variant.prefill >= engines:
            raise ConfigError(f"--policy {name}: that leaves none of {engines} engines to decode")
    return variants


def _apart(name: str, prefill: int) -> str:
    """Add ``prefill`` to a variant that does not set it itself."""
    if "prefill=" in name:
        return name
    return f"{name}{'+' if ':' in name else ':'}prefill={prefill}"


def _timing(options: SimulateOptions, fit: Fit | None) -> Timing:
    """Return the timing: flags take precedence over the fit, the fit over the defaults."""
    given: dict[str, float | int] = {}
    if options.prefill_tokens_per_s is not None:
        given["prefill_s_per_token"] = 1 / options.prefill_tokens_per_s
    if options.decode_tokens_per_s is not None:
        given["decode_s"] = 1 / options.decode_tokens_per_s
    if options.chunk_tokens is not None:
        given["chunk_tokens"] = options.chunk_tokens
    if options.seqs_max is not None:
        given["seqs_max"] = options.seqs_max
    with refused("timing", ValueError):
        return msgspec.structs.replace(Timing() if fit is None else fit.timing, **given)


_BOUNDS: dict[str, tuple[float, float]] = {
    "engines": (1, ENGINES_MAX),
    "prefill": (1, ENGINES_MAX),
    "decode": (1, ENGINES_MAX),
    "seeds": (1, SEEDS_MAX),
    "requests": (1, math.inf),
    "processes": (1, 1024),
    "block_tokens": (1, 1 << 20),
    "chunk_tokens": (1, 1 << 24),
    "seqs_max": (1, 1 << 20),
}
_POSITIVE = (
    "load",
    "speed",
    "seconds",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "transfer_gbyte_s",
    "pull",
)


def check_numbers(
    options: SimulateOptions | AdviseOptions,
    bounds: Mapping[str, tuple[float, float]],
    positive: Sequence[str],
) -> None:
    """Check options that are given: ``bounds`` by name, and numbers above 0. Raises ``ConfigError``."""
    allowed = [
        (name, least, most, f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more")
        for name, (least, most) in bounds.items()
    ]
    allowed += [(name, 1e-300, 1e9, "a number above 0") for name in (*positive, "kv_kib_per_token")]
    for name, least, most, expected in allowed:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {expected}")


@contextmanager
def refused(flag: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert an error of a component into a configuration error that names the flag."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{flag}: {error}") from None


@contextmanager
def progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("requests placed", total=total)
        yield lambda more: progress.advance(task, more)
