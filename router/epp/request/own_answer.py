"""An answer that the picker gives itself, in the gateway's place: an error, or what no engine is asked for.

Pure. An error says in a header of the Inference Extension why the request was dropped.
"""

from __future__ import annotations

import re

from router.epp.fields import own_fields
from router.epp.wire import messages as m
from router.http.server.seam import Message

_DROPPED = b"x-llm-d-request-dropped-reason"
_BY_STATUS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}
_BY_CODE = {
    b"queue_timeout": b"rejected-ttl-expired",
    b"too_many_bodies": b"rejected-saturated",
}
_CODE = re.compile(rb'"code":\s*"(\w+)"')


def dropped_reason(status: int, body: bytes) -> bytes | None:
    """Why the request was dropped, where it was: in the words of the Inference Extension."""
    if status not in _BY_STATUS:
        return None
    code = _CODE.search(body)
    return _BY_CODE.get(code[1] if code else b"", _BY_STATUS[status])


def own_answer(start: Message, body: bytes) -> bytes:
    """The message with this answer; ``start`` is its head as ASGI has it."""
    status = start["status"]
    headers = own_fields(start["headers"])
    reason = dropped_reason(status, body)
    if reason is not None:
        headers.append((_DROPPED, reason))
    return m.immediate(status, headers, body, f"kvatlas_{status}")
