"""A study as a table for a terminal, and as JSON. Times in seconds, hits of prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvatlas.router.simulation.fit import Fit
from kvatlas.router.simulation.outcome import Outcome
from kvatlas.router.simulation.split_verdict import verdict
from kvatlas.router.simulation.study import (
    Plan,
    Study,
    VariantReport,
    Workloads,
    mean_prompt_tokens,
    over_seeds,
)


class _Column(NamedTuple):
    name: str
    number: str
    """Of ``Outcome``."""
    digits: int
    scale: float = 1.0
    interval: bool = False
    """Whether half its interval over the seeds is shown beside it."""


class _Group(NamedTuple):
    """Columns that belong together, the plans that have them, and their legend."""

    shown: Callable[[Plan], bool]
    columns: tuple[_Column, ...]
    legend: str


_LEGEND_TIERS = " host %, store %: share of the prompt tokens that were hits loaded from there."
_LEGEND_SEEDS = " ± is half a 95 % interval over the seeds."
_GROUPS = (
    _Group(
        lambda _: True,
        (
            _Column("hit %", "hit_share", 1, 100.0, interval=True),
            _Column("mean s", "ttft_mean_s", 3, interval=True),
            _Column("p50 s", "ttft_p50_s", 3),
            _Column("p90 s", "ttft_p90_s", 2),
            _Column("p99 s", "ttft_p99_s", 2),
            _Column("imbal.", "imbalance", 2),
            _Column("error", "error_mean_tokens", 0),
            _Column("exact %", "exact_share", 0, 100.0),
            _Column("regret s", "regret_s", 3),
        ),
        "Seconds to the first token. imbal.: busiest engine over the mean; error: tokens between predicted "
        "and true hit; regret: later than at the best policy, request by request.",
    ),
    _Group(
        lambda plan: plan.setup.tiers is not None and plan.setup.tiers.host is not None,
        (_Column("host %", "host_share", 1, 100.0),),
        _LEGEND_TIERS,
    ),
    _Group(
        lambda plan: plan.setup.tiers is not None and plan.setup.tiers.store is not None,
        (_Column("store %", "store_share", 1, 100.0),),
        _LEGEND_TIERS,
    ),
    _Group(
        lambda plan: plan.setup.tiers is not None and plan.setup.tiers.pull_bytes_per_s > 0,
        (_Column("pull %", "pull_share", 1, 100.0), _Column("promised %", "promised_share", 1, 100.0)),
        " pull %: of the prompt tokens, those pulled from other engines; promised %: as decided.",
    ),
    _Group(
        lambda plan: any(variant.prefill for variant in plan.variants.values()),
        (
            _Column("answer s", "answer_mean_s", 2),
            _Column("ms/token", "per_token_mean_s", 1, 1000.0),
            _Column("p99 ms", "per_token_p99_s", 0, 1000.0),
            _Column("apart %", "apart_share", 0, 100.0),
        ),
        " answer s: to the last token; ms/token: between two tokens of an answer, p99 ms: of the slowest; "
        "apart %: requests whose prompt another engine computed.",
    ),
    _Group(
        lambda plan: plan.setup.closed,
        (_Column("answer s", "answer_mean_s", 2), _Column("total s", "lasted_s", 2)),
        " Closed sessions: answer s: to the last token; total s: until all work was done.",
    ),
)
_NUMBERS = tuple(field for field in Outcome.__struct_fields__ if field != "requests")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the study, for the head of a report."""

    workload: str
    model: str
    requests: int
    sessions: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    seeds: int
    engines: int
    blocks_per_engine: int
    pool: str
    """As given by the user: a share of what the requests of the run fill, or blocks."""
    tokens_per_engine: int
    """Number of full-attention blocks that fit into the pool if it held nothing else."""
    load: float | None
    speeds: list[float]


def facts_of(
    plan: Plan, study: Study, workloads: Workloads, *, workload: str, model: str, pool: str
) -> Facts:
    """Return the facts of the first seed's requests."""
    requests = next(iter(workloads.values()))
    setup = plan.setup
    return Facts(
        workload=workload,
        model=model,
        requests=len(requests),
        sessions=len({request.session for request in requests}),
        mean_prompt_tokens=mean_prompt_tokens(requests),
        mean_output_tokens=sum(request.output_tokens for request in requests) / len(requests),
        seeds=len(workloads),
        engines=setup.engines,
        blocks_per_engine=setup.num_blocks,
        pool=pool,
        tokens_per_engine=setup.num_blocks * min(group.block_size for group in setup.groups),
        load=plan.load,
        speeds=study.speeds,
    )


def retention_text(retention: int | None) -> str:
    """Format a retention as ``--retention`` takes it."""
    return "dense" if retention is None else str(retention)


def report_json(plan: Plan, study: Study, facts: Facts, fit: Fit | None) -> dict[str, Any]:
    """Return every number, per variant and seed."""
    return {
        "facts": msgspec.to_builtins(facts),
        "closed": plan.setup.closed,
        "tiers": msgspec.to_builtins(plan.setup.tiers),
        "timing": msgspec.to_builtins(plan.setup.timing),
        "fit": None if fit is None else msgspec.to_builtins(fit),
        "variants": [_variant(report) for report in study.reports],
    }


def _variant(report: VariantReport) -> dict[str, Any]:
    means = {name: over_seeds(report.outcomes, name) for name in _NUMBERS}
    return {
        "policy": report.variant,
        "retention": retention_text(report.retention),
        "prefill_rate_factor": report.rate_factor,
        "mean": {name: interval.mean for name, interval in means.items()},
        "ci95": {name: interval.half for name, interval in means.items()},
        "seeds": msgspec.to_builtins(report.outcomes),
        "curves": msgspec.to_builtins(report.results[0].curves),
    }


def show(plan: Plan, study: Study, facts: Facts, fit: Fit | None, console: Console) -> None:
    """Print head, table and legend."""
    console.print(_head(plan, facts), highlight=False)
    console.print(_load(study, facts, closed=plan.setup.closed), highlight=False)
    if fit is not None:
        _show_fit(fit, console)
    for table in _tables(plan, study):
        console.print(table)
    refused = max(outcome.refused for report in study.reports for outcome in report.outcomes)
    if refused:
        console.print(
            f"[yellow]{refused} requests fit no engine's cache and are left out; --pool is too small "
            "for them.[/]"
        )
    legend = "".join(dict.fromkeys(group.legend for group in _GROUPS if group.shown(plan)))
    legend += _LEGEND_SEEDS if facts.seeds > 1 else ""
    for line in _verdicts(plan, study):
        console.print(line, highlight=False)
    console.print(legend, style="dim", highlight=False)


def _head(plan: Plan, facts: Facts) -> str:
    timing = plan.setup.timing
    pool = f"{facts.tokens_per_engine} tokens"
    if facts.pool.endswith("%"):
        pool += f"; the fleet {facts.pool} of what these {facts.requests} requests fill"
    return (
        f"[bold]{facts.workload}[/]: {facts.requests} requests of {facts.sessions} sessions, on average "
        f"{facts.mean_prompt_tokens:.0f} prompt and {facts.mean_output_tokens:.0f} generated tokens\n"
        f"[bold]{facts.model}[/]: {facts.engines} engines of {facts.blocks_per_engine} blocks ({pool}), "
        f"prefill {1 / timing.prefill_s_per_token:.0f} tokens/s, "
        f"{1 / timing.decode_s:.0f} tokens/s per answer{_tiers_head(plan)}"
    )


def _tiers_head(plan: Plan) -> str:
    tiers = plan.setup.tiers
    if tiers is None:
        return ""
    parts = [
        f"{what} of {spec.blocks * tiers.block_bytes / (1 << 30):.1f} GiB, {spec.bytes_per_s / 1e9:.3g} GB/s"
        for what, spec in (("host memory", tiers.host), ("a shared store", tiers.store))
        if spec is not None
    ]
    size = f"{tiers.block_bytes / (1 << 20):.3g} MiB"
    return f"\nBehind them: {' and '.join(parts)} to each engine; blocks of {size}"


def _load(study: Study, facts: Facts, *, closed: bool) -> str:
    """Describe the requested load, as a share of the time in which requests arrive, and the engines' actual
    load in the first cell, over the whole run: the last queue is processed after the last arrival."""
    speed = f"{sum(facts.speeds) / len(facts.speeds):.2f} x the workload's speed"
    asked = (
        ""
        if facts.load is None
        else f", so that prompts take round robin {100 * facts.load:.0f} % of the time in which requests come"
    )
    sessions = "closed sessions; " if closed else ""
    first = study.reports[0]
    busy = ", ".join(
        f"{report.variant} {100 * over_seeds(report.outcomes, 'busy_share').mean:.0f} %"
        for report in study.reports
        if (report.retention, report.rate_factor) == (first.retention, first.rate_factor)
    )
    return (
        f"Load: arrivals at {speed}{asked}; {sessions}{facts.seeds} seed{'s' if facts.seeds > 1 else ''}\n"
        f"Busy with prompts, of the whole run until the last answer: {busy}"
    )


def _show_fit(fit: Fit, console: Console) -> None:
    for one in fit.estimates:
        console.print(
            f"fitted {one.name} = {one.value:.3g} s ({one.low:.3g} to {one.high:.3g}, {one.spread}, "
            f"{one.samples} samples)",
            highlight=False,
        )
    for note in fit.notes:
        console.print(note, style="dim", highlight=False)


def _tables(plan: Plan, study: Study) -> Iterator[Table]:
    """Make one table per cell, the best variant's mean in bold."""
    for retention in plan.retentions:
        for factor in plan.rate_factors:
            cell = [r for r in study.reports if (r.retention, r.rate_factor) == (retention, factor)]
            best_s = min(over_seeds(report.outcomes, "ttft_mean_s").mean for report in cell)
            table = Table(
                box=box.SIMPLE_HEAD,
                header_style="bold",
                title=_title(plan, retention, factor),
                pad_edge=False,
                show_edge=False,
                padding=0,
            )
            table.title_justify, table.title_style = "left", "bold"
            table.add_column("policy", overflow="fold")
            columns = _columns(plan)
            for column in columns:
                table.add_column(column.name, justify="right", no_wrap=not column.interval)
            for report in cell:
                mean_s = over_seeds(report.outcomes, "ttft_mean_s").mean
                table.add_row(
                    report.variant, *_numbers(report, columns), style="bold" if mean_s <= best_s else None
                )
            yield table


def _title(plan: Plan, retention: int | None, factor: float) -> str | None:
    parts = [f"retention {retention_text(retention)}"] if len(plan.retentions) > 1 else []
    parts += [f"prefill rate x {factor:g}"] if len(plan.rate_factors) > 1 else []
    return ", ".join(parts) or None


def _columns(plan: Plan) -> list[_Column]:
    """Return the columns of this plan; one that two groups have, once."""
    groups = [group for group in _GROUPS if group.shown(plan)]
    return list({column.name: column for group in groups for column in group.columns}.values())


def _verdicts(plan: Plan, study: Study) -> Iterator[str]:
    """Describe the effect of disaggregated prefill for each variant that uses it, compared with the one
    without."""
    for report in study.reports:
        variant = plan.variants[report.variant]
        same = msgspec.structs.replace(variant, prefill=0)
        alike = [
            other
            for other in study.reports
            if plan.variants[other.variant] == same
            and (other.retention, other.rate_factor) == (report.retention, report.rate_factor)
        ]
        if variant.prefill and alike:
            found = verdict(alike[0].outcomes, report.outcomes)
            yield (
                f"{variant.prefill} to prefill and {plan.setup.engines - variant.prefill} to decode "
                f"{found.word} under {alike[0].variant}: {found.text}."
            )


def _numbers(report: VariantReport, columns: Sequence[_Column]) -> Iterator[str]:
    for column in columns:
        interval = over_seeds(report.outcomes, column.number)
        text = f"{column.scale * interval.mean:.{column.digits}f}"
        if column.interval and interval.half is not None:
            text += f" ±{column.scale * interval.half:.{column.digits}f}"
        yield text
