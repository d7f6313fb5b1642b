"""Answers of the picker itself, sent as the gateway's reply: errors, and paths that need no engine.

Pure. For an error, a header of the Inference Extension carries the reason why the request was dropped.
"""

from __future__ import annotations

import re

from kvatlas.router.http.client_head import Header
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.header_fields import own_fields

_DROPPED = b"x-llm-d-request-dropped-reason"
_BY_STATUS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}
_BY_CODE = {b"queue_timeout": b"rejected-ttl-expired", b"too_many_bodies": b"rejected-saturated"}
_CODE = re.compile(rb'"code":\s*"(\w+)"')


def dropped_reason(status: int, body: bytes) -> bytes | None:
    """Return the Inference Extension's reason for a dropped request; None if the request was not dropped."""
    if status not in _BY_STATUS:
        return None
    code = _CODE.search(body)
    return _BY_CODE.get(code[1] if code else b"", _BY_STATUS[status])


def immediate_answer(status: int, fields: list[Header], body: bytes) -> bytes:
    """Encode this answer as an immediate response."""
    headers = own_fields(fields)
    reason = dropped_reason(status, body)
    if reason is not None:
        headers.append((_DROPPED, reason))
    return m.immediate(status, headers, body, f"kvatlas_{status}")
