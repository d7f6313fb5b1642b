"""Sessions by name: which header fields and members of a body name them, and where requests show them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.body import _INLINE_BYTES_MAX, peek, peek_any_size
from kvatlas.router.openai.request import Session
from kvatlas.router.openai.sessions import SESSION_CHARS_MAX, session_in_headers
from kvatlas.router.prompts.bodies import peek_chat
from tests.support import proxy_rig
from tests.support.proxy_rig import ask, says
from tests.support.waiting import run, until

UUID = "6b0d2f0e-93c1-4f7e-8d5d-0c8f6a1f2b3c"
CLAUDE = f"user_1f_account__session_{UUID}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"x-request-id": "r"}, None),
        ({"x-session-id": "s"}, Session("s")),
        ({"x-claude-code-session-id": UUID}, Session(UUID)),
        ({"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a7"}, Session(UUID, "a7")),
        ({"session-id": "s", "thread-id": "s"}, Session("s")),
        ({"session-id": "s", "thread-id": "t"}, Session("s", "t")),
        ({"session_id": "s"}, Session("s")),
        ({"x-session-affinity": "s"}, Session("s")),
        ({"x-session-affinity": "child", "x-parent-session-id": "s"}, Session("s", "child")),
        ({"x-session-id": "child", "x-parent-session-id": "s"}, Session("s", "child")),
        ({"x-session-affinity": "late", "x-session-id": "first"}, Session("first")),
        ({"x-session-id": " ", "session-id": " s "}, Session("s")),
        ({"x-claude-code-agent-id": "a", "x-parent-session-id": "p"}, None),
    ],
)
def test_header_fields_name_a_session_and_its_sub_agent(
    fields: dict[str, str], expected: Session | None
) -> None:
    assert session_in_headers({name.encode(): value.encode() for name, value in fields.items()}) == expected


@given(value=st.binary(max_size=3 * SESSION_CHARS_MAX))
def test_a_name_is_printable_and_bounded_and_the_same_name_stays_the_same(value: bytes) -> None:
    first, again = (session_in_headers({b"x-session-id": value}) for _ in range(2))
    assert first == again
    assert (first is None) is not value.strip()
    if first is not None:
        assert first.id.isascii()
        assert first.id.isprintable()
        assert 0 < len(first.id) <= SESSION_CHARS_MAX


def test_names_that_are_too_long_are_still_distinguished() -> None:
    found = {session_in_headers({b"x-session-id": b"x" * 500 + b"%d" % n}) for n in range(9)}
    assert len(found) == 9


MEMBERS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"session_id": "s"}, "s"),
    ({"prompt_cache_key": "k"}, "k"),
    ({"prompt_cache_key": "k", "session_id": "s", "metadata": {"user_id": CLAUDE}}, "s"),
    ({"prompt_cache_key": "k", "metadata": {"user_id": CLAUDE}}, UUID),
    ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, UUID),
    ({"metadata": {"user_id": "user-7"}, "prompt_cache_key": "k"}, "k"),
    ({"metadata": {"user_id": ["_session_1"]}, "session_id": 7, "prompt_cache_key": None}, None),
    ({"metadata": "session", "session_id": {"a": 1}}, None),
    ({"session_id": "", "prompt_cache_key": "k"}, "k"),
    ({"session_id": "\udc00"}, "?"),
]


@pytest.mark.parametrize(("members", "expected"), MEMBERS)
def test_members_of_a_body_name_a_session_however_it_is_read(
    members: dict[str, Any], expected: str | None
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **members}
    text = json.dumps(body).encode()
    session = None if expected is None else Session(expected)
    chat = peek_chat(CHAT, text)
    half = "\\udc00" in text.decode()  # only Python's own parser takes half a surrogate pair
    if not half:
        assert peek(text).session == session
        assert chat is not None
        assert chat.session == session
    assert peek(text[:-1] + b', "n": NaN}').session == session
    large = run(peek_any_size(text[:-1] + b', "text": "%b"}' % (b"x" * _INLINE_BYTES_MAX)))
    if "metadata" not in members and not half:  # of a large body the members of members are not read
        assert large.session == session


async def test_a_named_session_is_in_the_log_and_among_the_requests() -> None:
    body = proxy_rig.CHAT.replace(b"{", b'{"prompt_cache_key": "k", ', 1)
    async with proxy_rig.Engine(says(200, b"{}")) as engine, proxy_rig.routing(engine.url) as rig:
        rig.app.requests.log = True
        with structlog.testing.capture_logs() as logs:
            for fields in (["x-claude-code-session-id: s", "x-claude-code-agent-id: a"], ["x-unrelated: 1"]):
                assert (await ask(rig, proxy_rig.request(body, *fields))).status == 200
            assert (await ask(rig)).status == 200
            await until(lambda: len(rig.app.requests.ended) == 3, "all ended")
        lines = [line for line in logs if line["event"] == "request"]
        assert [(line.get("session"), line.get("agent")) for line in lines] == [
            ("s", "a"),
            ("k", None),
            (None, None),
        ]
        assert [one.session for one in rig.planner.requests] == [Session("s", "a"), Session("k"), None]
        facts = rig.app.requests.ended[0].facts()
        assert (facts["gen_ai.conversation.id"], facts["gen_ai.agent.id"]) == ("s", "a")
