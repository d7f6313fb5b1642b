"""Other names of models: what is asked for instead, by which shares, and that nothing else changes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.members import at_once, with_value
from router.openai.request import Session
from router.proxy.settings import Aliases


def test_shares_are_kept_and_a_session_stays() -> None:
    aliases = Aliases({"big": {"a": 3.0, "b": 1.0, "off": 0.0}})
    asked = Counter(aliases.model_for("big", Session(str(n))) for n in range(4000))
    assert set(asked) == {"a", "b"}
    assert 0.70 < asked["a"] / 4000 < 0.80
    agents = [Session("one of them", agent) for agent in ("", "a", "b", "c")]
    assert len({aliases.model_for("big", session) for session in agents * 10}) == 1
    assert {aliases.model_for("big", None) for _ in range(200)} == {"a", "b"}
    assert aliases.model_for("a", None) is None
    assert aliases.model_for(None, None) is None
    assert aliases.items() == [("big", ["a", "b"])]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"x": {}}, "x: expected models"),
        ({"x": {"a": -1.0}}, "x: expected models"),
        ({"x": {"a": 0.0}}, "one weight at least"),
        ({"x": {"y": 1.0}, "y": {"a": 1.0}}, "y is an alias itself"),
    ],
)
def test_what_cannot_be(shares: dict[str, dict[str, float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Aliases(shares)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(body=st.dictionaries(st.text(max_size=6) | st.just("model"), values, max_size=5), indent=st.booleans())
def test_only_the_model_changes(body: dict[str, object], indent: bool) -> None:
    text = json.dumps(body, indent=2 if indent else None).encode()
    changed = at_once(with_value(text, b"model", 'new "name"'))
    if "model" in body:
        assert json.loads(changed) == body | {"model": 'new "name"'}
        assert list(json.loads(changed)) == list(body)
    else:
        assert changed == text


def test_of_equal_keys_the_last_counts_as_engines_read_it() -> None:
    assert (
        at_once(with_value(b'{"model": "x", "mo\\u0064el" : "y"}', b"model", "z"))
        == b'{"model": "x", "mo\\u0064el" : "z"}'
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"model": ', b"not json"])
def test_what_is_no_object_stays(body: bytes) -> None:
    assert at_once(with_value(body, b"model", "z")) == body
