"""``kv_cache_report_mode`` of clients: passed, taken out with nothing else touched, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.members import at_once
from kvatlas.router.proxy.screen import Rules
from kvatlas.router.proxy.screen import screen as steps
from kvatlas.router.proxy.settings import ReportMode


def screen(body: bytes, mode: ReportMode) -> bytes:
    return bytes(at_once(steps(body, Rules(transfer=False, report_mode=mode))).body)


PLAIN = b'{"model": "m",  "messages":[{"role":"user","content":"kv_cache_report_mode \\u00e9 {}[],:"}]}'
ASKS = b'{"a":1.50, "vllm_xargs" : {"kv_cache_report_mode":"full","top":[1, 2]} ,"z":"\\u00e9"}'


def test_pass_touches_nothing() -> None:
    assert screen(ASKS, "pass") is ASKS


@pytest.mark.parametrize("mode", ["strip", "refuse"])
def test_requests_that_do_not_ask_are_left_alone(mode: Any) -> None:
    assert screen(PLAIN, mode) == PLAIN
    assert screen(b"not json report_mode", mode) == b"not json report_mode"
    mentioned = b'{"x":{"vllm_xargs":{"kv_cache_report_mode":"full"}}}'  # nested: no engine looks there
    assert screen(mentioned, mode) == mentioned


def test_strip_changes_that_field_only() -> None:
    assert screen(ASKS, "strip") == b'{"a":1.50, "vllm_xargs" : {"top":[1, 2]} ,"z":"\\u00e9"}'
    alone = b'{"vllm_xargs":{"kv_cache_report_mode":"full"}}'
    assert screen(alone, "strip") == b'{"vllm_xargs":{}}'


def test_refuse_names_the_field() -> None:
    with pytest.raises(ApiError) as caught:
        screen(ASKS, "refuse")
    assert caught.value.status == 400
    assert caught.value.code == "kv_cache_report_mode_refused"
    assert caught.value.param == "vllm_xargs.kv_cache_report_mode"


EVASIONS = {
    "escaped key": b'{"vllm_xargs":{"kv_cache_\\u0072eport_mode":"full"}}',
    "escaped field": b'{"vllm_\\u0078args":{"kv_cache_report_mode":"full"}}',
    "given twice": b'{"vllm_xargs":{},"vllm_xargs":{"kv_cache_report_mode":"full"}}',
}


@pytest.mark.parametrize("name", EVASIONS)
def test_spellings_do_not_slip_through(name: str) -> None:
    with pytest.raises(ApiError):
        screen(EVASIONS[name], "refuse")
    left = json.loads(screen(EVASIONS[name], "strip"))
    assert left == {"vllm_xargs": {}}


@pytest.mark.parametrize("mode", ["strip", "refuse"])
def test_fields_that_cannot_be_cut_are_refused(mode: Any) -> None:
    with pytest.raises(ApiError):
        screen('{"vllm_xargs":{"kv_cache_report_mode":"full"}}'.encode("utf-16"), mode)


def test_fields_that_only_pythons_parser_reads_are_cut_too() -> None:
    text = b'{"x": NaN, "vllm_xargs":{"kv_cache_report_mode":"full"}}'
    with pytest.raises(ApiError):
        screen(text, "refuse")
    assert screen(text, "strip") == b'{"x": NaN, "vllm_xargs":{}}'


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
members = st.dictionaries(
    st.text(max_size=6) | st.sampled_from(["vllm_xargs", "messages"]), values, max_size=5
)


@given(members, st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3), st.booleans())
def test_strip_is_deletion(body: dict[str, Any], xargs: dict[str, Any], spaced: bool) -> None:
    body = {**body, "vllm_xargs": {**xargs, "kv_cache_report_mode": "full"}}
    text = json.dumps(body, indent=2 if spaced else None).encode()
    expected = {**body, "vllm_xargs": {k: v for k, v in xargs.items() if k != "kv_cache_report_mode"}}
    assert json.loads(screen(text, "strip")) == expected
