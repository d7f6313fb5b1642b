"""Members of a body found without reading all of it."""

from __future__ import annotations

import contextlib
import json

import pytest

from kvatlas.router.openai.body import OutlineError, top_level

NAMES = ("model", "stream")
BODY = b'{"messages" : [{"model":"inner"}], "model" : "m-1" , "stream":true}'


def test_own_members_are_found_and_those_of_inner_objects_are_not() -> None:
    assert top_level(BODY, NAMES) == {"model": b'"m-1"', "stream": b"true"}


@pytest.mark.parametrize("end", range(len(BODY)))
def test_a_body_that_was_cut_anywhere_is_refused(end: int) -> None:
    with pytest.raises(OutlineError):
        top_level(BODY[:end], NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", range(1, 9))
def test_a_key_that_ends_with_the_body_is_no_member(name: str, end: int) -> None:
    """Also one that ends where its name would go on."""
    body = b'{"a":1,' + f'"{name}"'.encode()[:end]
    with pytest.raises(OutlineError):
        top_level(body, NAMES)
    with contextlib.suppress(OutlineError):
        assert top_level(body + b"}", NAMES) == {}


@pytest.mark.parametrize("spaces", range(6))
def test_spaces_before_the_colon_are_skipped(spaces: int) -> None:
    body = b'{"model"%b:"m","x":"model","stream"%b: false}' % (b" " * spaces, b"\n" * spaces)
    assert top_level(body, NAMES) == {"model": b'"m"', "stream": b"false"}
    assert json.loads(body)["model"] == "m"


def test_a_value_with_a_members_name_is_no_member() -> None:
    assert top_level(b'{"x":"model","y":"stream"  ,"model":1}', NAMES) == {"model": b"1"}
