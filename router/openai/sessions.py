"""Where clients name their sessions: the first entry that a request has counts, header fields first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import xxhash

from kvatlas.router.openai.request import Session


class _SessionFields(NamedTuple):
    """Header fields of one client. ``agent`` names a sub-agent within the session, ``parent`` the session
    that the named one is a sub-agent of."""

    session: bytes
    agent: bytes = b""
    parent: bytes = b""


# Header field of vLLM (entrypoints/generate/base/serving.py, 0.33).
SESSION: Final = b"x-session-id"
_SESSION_FIELDS: Final = (
    # also OpenCode's, which has a session for each sub-agent
    _SessionFields(SESSION, parent=b"x-parent-session-id"),
    _SessionFields(b"x-claude-code-session-id", agent=b"x-claude-code-agent-id"),
    # Codex: the main thread has the id of its session
    _SessionFields(b"session-id", agent=b"thread-id"),
    _SessionFields(b"session_id", agent=b"thread-id"),
    _SessionFields(b"x-session-affinity", parent=b"x-parent-session-id"),
)
SESSION_FIELDS: Final = frozenset(fields.session for fields in _SESSION_FIELDS)
"""Without one of them a head names no session."""
# Members of the body that name a session; ``metadata.user_id`` is read between them.
SESSION_MEMBERS: Final = ("session_id", "prompt_cache_key")
# Claude Code's ``metadata.user_id`` ends in the session's UUID, or is a JSON text that has it.
_IN_USER_ID: Final = re.compile(r'(?:_session_|"session_id" ?: ?")([0-9A-Za-z-]{1,64})')
SESSION_CHARS_MAX: Final = 128
_PRINTABLE: Final = re.compile(rb"[!-~](?:[ -~]{0,%d}[!-~])?" % (SESSION_CHARS_MAX - 2))


def session_in_headers(told: Mapping[bytes, bytes]) -> Session | None:
    """The session that header fields name."""
    for fields in _SESSION_FIELDS:
        if name := session_name(told.get(fields.session, b"")):
            if parent := session_name(told.get(fields.parent, b"")):
                return Session(parent, "" if parent == name else name)
            agent = session_name(told.get(fields.agent, b""))
            return Session(name, "" if agent == name else agent)
    return None


def session_in_body(session_id: str | None, user_id: str | None, cache_key: str | None) -> Session | None:
    """The session that these members of a body name."""
    found = None if session_id or not user_id else _IN_USER_ID.search(user_id)
    text = session_id or (found[1] if found else cache_key)
    name = session_name(text.encode(errors="replace")) if text else ""
    return Session(name) if name else None


def session_name(value: bytes) -> str:
    """A client's name for a session, as kept here. Where it is too long or has other characters, its digest
    stands for it."""
    value = value.strip()
    if not value or _PRINTABLE.fullmatch(value):
        return value.decode("ascii")
    return f"xxh3-{xxhash.xxh3_128_hexdigest(value)}"
