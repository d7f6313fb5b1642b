"""docs/kubernetes.md, typed as written: from the files of a release to a verified receipt in a cluster.

The router is the wheel's, started with what the chart's package renders; the API server is a stand-in.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helm_python import Chart

from tests.charts.chart import CHART
from tests.support import cluster
from tests.support.paths import ROOT, built
from tests.support.reader import MODEL, Block, Reader, blocks, verified
from tests.support.wheels import build, with_extras

pytestmark = [pytest.mark.real, pytest.mark.process]  # its subject is what is installed, in processes

PAGE = ROOT / "docs" / "kubernetes.md"
HEADINGS = ("1. Push the image", "3. Install the router", "4. Verify a response")


def stand_in(what: str) -> str:
    """A program of the cluster."""
    return f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.support.cluster {what} "$@"\n'


def test_from_an_image_and_a_chart_to_a_receipt(tmp_path: Path) -> None:
    wheel = built("*.whl") or build(ROOT, "wheel", tmp_path / "wheel")
    python = with_extras(wheel, tmp_path / "environment")
    package = built("kvatlas-?.*.tgz")
    if package is None:
        with Chart.load(CHART) as chart:
            package = Path(chart.save(tmp_path))
    programs = {
        "docker": '#!/bin/sh\ncase $1 in load|tag|push) echo "$@";; *) exit 1;; esac\n',
        **{name: stand_in(name) for name in ("helm", "kubectl", "api")},
    }
    names = {cluster.SERVICE_NAME: cluster.SERVICE}
    machine = tmp_path / "machine"
    with Reader(
        machine, python, programs, addresses=(*cluster.ENGINES, cluster.SERVICE), names=names
    ) as reader:
        (reader.folder / package.name).symlink_to(package)
        ports = f"--port {cluster.ENGINE_PORTS['http']} --set model={MODEL}"
        for setting, name in (("events_port", "kv-events"), ("replay_port", "kv-replay")):
            ports += f" --set {setting}={cluster.ENGINE_PORTS[name]}"
        for address in cluster.ENGINES:
            reader.run(Block("", f"kvatlas engine --host {address} {ports} >{address}.log 2>&1 &"))
        reader.run(Block("", "api >api.log 2>&1 &"))
        typed = []
        for block in blocks(PAGE, "sh"):
            if block.heading in HEADINGS:
                if "/kvatlas/receipts |" in block.text:
                    verified(reader, block)
                else:
                    reader.run(block)
                typed.append(block.heading)
    assert typed == [*HEADINGS, HEADINGS[-1]]
