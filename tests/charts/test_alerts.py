"""The alerts, judged by Prometheus' own promtool: which fire in which state of a fleet, and no others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.chart import MINIMAL, Rendered

NAMESPACE = 'namespace="llm"'
MINUTES = 30

Series = dict[str, str]


def router(
    pod: str, *, up: int = 1, slow: bool = False, statuses: dict[str, int] | None = None, **engines: int
) -> Series:
    """Samples of one router: answers a minute by status, first tokens, and engines by name."""
    labels = f'{NAMESPACE}, pod="kvatlas-{pod}"'
    series = {f"up{{{labels}}}": f"{up}x{MINUTES}"}
    if up:
        for status, count in ({"200": 600, "404": 600} | (statuses or {})).items():
            of = f'{labels}, model="m", engine="e", status="{status}"'
            series[f"kvatlas_requests_total{{{of}}}"] = f"0+{count}x{MINUTES}"
        for le in ("1", "30", "+Inf"):
            name = f'kvatlas_time_to_first_token_seconds_bucket{{{labels}, model="m", le="{le}"}}'
            series[name] = f"0+{0 if slow and le == '1' else 600}x{MINUTES}"
    for engine, answers in engines.items():
        series[f'kvatlas_engine_up{{{labels}, engine="{engine}"}}'] = f"{answers}x{MINUTES}"
    return series


def first_tokens(**outcomes: int) -> Series:
    """Predictions a minute of one engine, by outcome."""
    name = "kvatlas_time_to_first_token_predictions_total"
    labels = f'{NAMESPACE}, pod="kvatlas-a", engine="one"'
    return {f'{name}{{{labels}, outcome="{outcome}"}}': f"0+{n}x{MINUTES}" for outcome, n in outcomes.items()}


STATES: dict[str, tuple[Series, set[str]]] = {
    "all is well, and clients ask for models that there are not": (router("a", one=1, two=1), set()),
    "one engine of two is away": (router("a", one=1, two=0), set()),
    "every engine is away": (router("a", one=0, two=0), {"KvatlasNoEngine"}),
    "no engine is known": (router("a"), {"KvatlasNoEngine"}),
    "nothing is scraped": ({}, {"KvatlasDown"}),
    "every router is away": (router("a", up=0), {"KvatlasDown", "KvatlasRouterDown"}),
    "one router of two is away": (router("a", up=0) | router("b", one=1), {"KvatlasRouterDown"}),
    "a few requests fail": (router("a", statuses={"503": 6}, one=1), set()),
    "many requests fail": (router("a", statuses={"503": 90}, one=1), {"KvatlasErrors"}),
    "answers break off": (router("a", statuses={"broken_stream": 90}, one=1), {"KvatlasErrors"}),
    "clients leave": (router("a", statuses={"client_gone": 90}, one=1), set()),
    "first tokens are slow": (router("a", slow=True, one=1), {"KvatlasSlowFirstToken"}),
    "first tokens come as predicted": (router("a", one=1) | first_tokens(held=50, late=10), set()),
    "first tokens do not come as predicted": (
        router("a", one=1) | first_tokens(held=10, late=50),
        {"KvatlasFirstTokensUnpredicted"},
    ),
    "few first tokens do not come as predicted": (router("a", one=1) | first_tokens(held=0, late=1), set()),
}


@pytest.mark.parametrize("state", STATES)
def test_alerts_that_fire(state: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH (it comes with Prometheus)")
    series, alerts = STATES[state]
    rule = Rendered({**MINIMAL, "prometheusRule": {"enabled": True}}).one("PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)]
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{MINUTES}m", "exp_samples": expected}],
    }
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(file))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
