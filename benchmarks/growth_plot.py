"""Draws results/growth.svg from the JSON lines in results/growth.jsonl: how costs grow, one panel per kind.

    python -m benchmarks.growth_plot

The lines are what benchmarks/scale.py, replicas.py, streams.py and workers.py print. Needs
matplotlib, which no extra installs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
Line = dict[str, Any]


def drawn(lines: list[Line]) -> Figure:
    """Four panels: engines, blocks, replicas, workers."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    engines, blocks, replicas, workers = figure.subplots(2, 2).flat
    of = [line for line in lines if "engines" in line]
    _over(engines, of, "engines", ("placement_us", "request_us"))
    engines.set(title="One request, in process", ylabel="CPU, us", yscale="log")
    of = [line for line in lines if "blocks_m" in line]
    _over(blocks, of, "blocks_m", ("lookup_1000_us", "bytes_per_block"))
    blocks.set(title="Index of one engine", xlabel="million blocks", ylim=(0, None))
    for nodes, name in ((1, "one Redis"), (3, "Cluster of three")):
        of = [line for line in lines if line.get("nodes") == nodes]
        _over(replicas, of, "replicas", ("servers_us_per_request", "replica_us_per_request"), f", {name}")
    replicas.set(
        title="Shared index, a look-up of 1,000 blocks", ylabel="CPU of a request, us", ylim=(0, None)
    )
    for load in ("demo", "trace"):
        of = [line for line in lines if line.get("load") == load]
        shares = [100 * line["hit_tokens"] / line["prompt_tokens"] for line in of]
        workers.plot([line["workers"] for line in of], shares, "o", label=load)
    workers.set(title="Cached share of prompt tokens, each run", xlabel="workers", ylabel="%", ylim=(0, 100))
    workers.set_xticks([1, 4])
    workers.legend()
    return figure


def _over(axes: Any, lines: list[Line], over: str, fields: tuple[str, ...], name: str = "") -> None:
    x = [line[over] for line in lines]
    for field in fields:
        axes.plot(x, [line[field] for line in lines], "o-", label=field.replace("_", " ") + name)
    axes.set(xscale="log", xlabel=over)
    axes.set_xticks(x, [str(one) for one in x])
    axes.minorticks_off()
    axes.legend()


def main() -> None:
    """Write the picture."""
    mpl.rcParams["svg.hashsalt"] = "kvatlas"  # else ids differ from run to run
    text = (RESULTS / "growth.jsonl").read_text(encoding="ascii")
    figure = drawn([json.loads(line) for line in text.splitlines()])
    figure.savefig(RESULTS / "growth.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
