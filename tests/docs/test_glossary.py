"""docs/glossary.md has every value that explain, engines, receipts and metrics can show."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from typing import get_args

import msgspec
import pytest

from kvatlas.router.api import explanation
from kvatlas.router.api.answers import EngineBrief, EngineView
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.frames import REASONS as MALFORMED
from kvatlas.router.feeds.position import DOUBTS
from kvatlas.router.feeds.recovery import RepairKind
from kvatlas.router.fleet.engines import NOT_READY
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.removals import Removals
from kvatlas.router.index.query_plan import Mode
from kvatlas.router.observe.receipts import Outcome
from kvatlas.router.observe.usage import UsageStats
from kvatlas.router.openai.request import FAILURES
from kvatlas.router.placement.candidate import Cost, Reason
from kvatlas.router.placement.first_token import FirstTokenSummary
from kvatlas.router.placement.load import EngineLoad
from kvatlas.router.prompts.settings import REASONS as NOT_LOCAL
from kvatlas.router.services.kubernetes import pool_engines
from tests.docs.pages import inline_code
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "glossary.md"


@pytest.mark.parametrize(
    "values",
    [
        FeedState,
        [kind.value for kind in RepairKind],
        DOUBTS,
        MALFORMED,
        [NOT_READY, pool_engines.TERMINATING, pool_engines.ANNOTATED, pool_engines.NO_SLICE],
        Detection,
        Removals,
        get_args(Mode),
        UsageStats().dropped,
        get_args(Outcome),
        FAILURES,
        get_args(Reason),
        NOT_LOCAL,
    ],
)
def test_every_value_is_explained(values: Iterable[str]) -> None:
    known = set(inline_code(PAGE))
    assert [value for value in map(str, values) if value not in known] == []


def test_every_column_of_the_page_is_explained() -> None:
    html = (ROOT / "router/api/status_page.html").read_text(encoding="utf-8")
    columns = html.partition("const ENGINE_COLUMNS = [")[2].partition("];")[0]
    labels = re.findall(r'^  \["([^"]+)"', columns, re.MULTILINE)
    text = PAGE.read_text(encoding="utf-8").lower() + html.partition("Meaning of the figures")[2].lower()
    assert len(labels) > 8
    assert [label for label in labels if label.lower().removesuffix(" s") not in text] == []


def test_held_means_that_a_cache_has_it() -> None:
    """Engines are on hold, and predictions of first tokens accurate."""
    fields = [
        *EngineView.__struct_fields__,
        *EngineBrief.__struct_fields__,
        *FirstTokenSummary.__struct_fields__,
    ]
    assert [name for name in fields if "held" in name] == ["blocks_held"]


def test_every_part_of_a_cost_and_a_load_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [field.name for struct in (Cost, EngineLoad) for field in msgspec.structs.fields(struct)]
    assert [name for name in names if name != "engine_id" and name not in text] == []


def test_every_field_of_an_engine_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [field for field in EngineView.__struct_fields__ if f"{field}`" not in text] == []


@pytest.mark.parametrize("shown", [explanation._engine, explanation._prompt])
def test_every_field_that_is_shown_is_explained(shown: Callable[..., object]) -> None:
    tree = ast.parse(inspect.getsource(shown))
    keys = [
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]
    text = PAGE.read_text(encoding="utf-8")
    assert keys
    assert [key for key in keys if f"{key}`" not in text] == []


def test_every_error_code_is_explained() -> None:
    """Codes are written as literals: the second argument of ``ApiError``, the first of ``bad_request``."""
    known, found = set(inline_code(PAGE)), set()
    for path in (ROOT / "router").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "ApiError" not in source and "bad_request" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"ApiError": 1, "bad_request": 0}.get(node.func.id)
                code = node.args[place] if place is not None and len(node.args) > place else None
                if isinstance(code, ast.Constant):
                    found.add(code.value)
    assert len(found) > 20
    assert found - known == set()
