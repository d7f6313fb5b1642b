"""Plots of a study: times to first token, hit share over the run, load per engine. First seed of each
variant.

Needs matplotlib (the extra ``plot``), which is imported only here, without its window code. An ``.html`` page
is self-contained: it embeds the plot as SVG and loads nothing.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from router.simulate.plan import Study, VariantReport, over_seeds
from router.simulate.report import Facts, retention_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_LINES = ("-", "--", ":", "-.")
ENDINGS = (".png", ".svg", ".html")
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
</style></head>
<body><h1>{title}</h1><p>{text}</p>
{svg}
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""
_COLUMNS = {
    "hit %": ("hit_share", 100.0, 1),
    "mean s": ("ttft_mean_s", 1.0, 3),
    "p50 s": ("ttft_p50_s", 1.0, 3),
    "p90 s": ("ttft_p90_s", 1.0, 2),
    "p99 s": ("ttft_p99_s", 1.0, 2),
    "imbalance": ("imbalance", 1.0, 2),
    "regret s": ("regret_s", 1.0, 3),
}


class PlotError(ValueError):
    """The plot cannot be drawn."""


def check_plot(path: Path) -> None:
    """Raise ``PlotError`` for an unknown file type or missing matplotlib, before anything runs."""
    if path.suffix not in ENDINGS:
        raise PlotError(f"{path}: the name must end in one of {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: the folder does not exist")
    _library()


def draw(study: Study, facts: Facts, path: Path) -> None:
    """Write the plot or page. Raises ``PlotError``."""
    figure = _figure(study, facts)
    try:
        if path.suffix == ".html":
            path.write_text(_page(study, facts, figure), encoding="utf-8")
        else:
            figure.savefig(path, format=path.suffix[1:], metadata=_undated(path.suffix))
    except OSError as error:
        raise PlotError(f"{path}: {error}") from None


def label(report: VariantReport, study: Study) -> str:
    """Return the variant, and the parameters of its cell that differ within the study."""
    parts = [report.variant]
    if len({other.retention for other in study.reports}) > 1:
        parts.append(f"retention {retention_text(report.retention)}")
    if len({other.rate_factor for other in study.reports}) > 1:
        parts.append(f"rate x {report.rate_factor:g}")
    return ", ".join(parts)


def _library() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra, and slow to load
        from matplotlib import figure  # noqa: PLC0415
    except ImportError:
        raise PlotError("--plot needs matplotlib: python -m pip install matplotlib") from None
    mpl.rcParams["svg.hashsalt"] = "kvatlas"  # else ids in an SVG differ from run to run
    return figure


def _figure(study: Study, facts: Facts) -> Figure:
    """Draw one colour per policy and one line style per cell; the legend is beside the curves."""
    figure: Figure = _library().Figure(figsize=(17, 5.5), layout="constrained")
    figure.suptitle(_title(facts))
    variants = list(dict.fromkeys(report.variant for report in study.reports))
    cells = list(dict.fromkeys((report.retention, report.rate_factor) for report in study.reports))
    waits, hits, loads = figure.subplots(1, 3)
    for report in study.reports:
        cell = cells.index((report.retention, report.rate_factor))
        look = {"color": f"C{variants.index(report.variant) % 10}", "linestyle": _LINES[cell % len(_LINES)]}
        _draw_variant(report, label(report, study), look, waits, hits, loads)
    waits.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    hits.set(xlabel="share of the run", ylabel="hit share of prompt tokens", xlim=(0, 1))
    hits.set_ylim(bottom=0)
    loads.set(xlabel="engine, busiest first", ylabel="share of time busy with prompts")
    loads.set_ylim(0, 1.02)
    loads.xaxis.get_major_locator().set_params(integer=True)
    names = ("Time to first token", "Cache hits over the run", "Load of the engines")
    for axes, name in zip((waits, hits, loads), names, strict=True):
        axes.set_title(name)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*waits.get_legend_handles_labels(), fontsize="small", loc="outside right center")
    return figure


def _title(facts: Facts) -> str:
    return f"{facts.workload} on {facts.engines} engines of {facts.model}"


def _draw_variant(
    report: VariantReport, name: str, look: dict[str, Any], waits: Axes, hits: Axes, loads: Axes
) -> None:
    result = report.results[0]
    times = np.sort(result.ttft_s[result.ttft_s >= 0])
    waits.plot(np.maximum(times, 1e-4), np.arange(1, len(times) + 1) / len(times), label=name, **look)
    shares = result.curves.hit_shares
    hits.plot((np.arange(len(shares)) + 0.5) / len(shares), shares, **look)
    busy = sorted(result.curves.busy_shares, reverse=True)
    loads.plot(range(1, len(busy) + 1), busy, marker="o", markersize=3, **look)


def _undated(suffix: str) -> dict[str, str | None]:
    return {"Date": None} if suffix == ".svg" else {"Software": None}


def _page(study: Study, facts: Facts, figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_undated(".svg"))
    text = _METADATA.sub("", buffer.getvalue())
    rows = []
    for report in study.reports:
        cells = [html.escape(label(report, study))]
        for name, scale, digits in _COLUMNS.values():
            cells.append(f"{scale * over_seeds(report.outcomes, name).mean:.{digits}f}")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return _PAGE.format(
        title=html.escape(_title(facts)),
        text=html.escape(
            f"{facts.requests} requests, {facts.mean_prompt_tokens:.0f} prompt tokens on average; "
            f"{facts.blocks_per_engine} blocks per engine; numbers are means over {facts.seeds} seed(s), "
            "the picture is of the first."
        ),
        svg=text[text.index("<svg") :],
        head="".join(f"<th>{html.escape(name)}</th>" for name in ("policy", *_COLUMNS)),
        rows="\n".join(rows),
    )
