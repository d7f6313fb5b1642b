"""What a request says of its turn: class, weight, and until when its client waits.

The class is that of the tenant in the key file, or a lower one that the request asks for: by
``x-kvatlas-priority``, else by ``priority`` in its body, which engines with priority scheduling read too
(vLLM: lower values come first). Without keys nobody is above another, and every request may say its class.
"""

from __future__ import annotations

import math

from router.admission.key_file import TenantRules
from router.admission.queue.fair import Priority
from router.openai.errors import bad_request, echoed
from router.openai.request import Claim

PRIORITY, TIMEOUT = b"x-kvatlas-priority", b"x-request-timeout"
_CLASSES = {one.name.lower(): one for one in Priority}


def read_claim(
    fields: list[tuple[bytes, bytes]],
    *,
    in_body: int | None,
    arrived_s: float,
    tenant: str = "",
    rules: TenantRules | None = None,
) -> Claim:
    """Of a request with these header fields, and this ``priority`` in its body. Raises ``ApiError`` (400)."""
    asked: Priority | None = None
    until_s: float | None = None
    for name, value in fields:
        if name == PRIORITY:
            asked = _class(value)
        elif name == TIMEOUT:
            until_s = arrived_s + _seconds(value)
    if asked is None and in_body is not None:
        asked = Priority.HIGH if in_body < 0 else Priority.LOW if in_body else Priority.NORMAL
    if rules is None:
        return Claim(priority=Priority.NORMAL if asked is None else asked, until_s=until_s)
    own = _CLASSES[rules.priority]
    priority = own if asked is None else max(own, asked)
    return Claim(tenant=tenant, weight=rules.weight, priority=priority, until_s=until_s)


def lowest_priority(rules: TenantRules) -> int | None:
    """The lowest ``priority`` that a tenant's class may give an engine, where lower values come first; None:
    any. vLLM's default, 0, is that of the class between (vllm/v1/core/sched/scheduler.py of 0.32)."""
    own = _CLASSES[rules.priority]
    return None if own is Priority.HIGH else 0 if own is Priority.NORMAL else 1


def _class(value: bytes) -> Priority:
    text = value.decode("latin-1").strip().lower()
    if text not in _CLASSES:
        raise bad_request(
            "invalid_priority", f"x-kvatlas-priority: {echoed(text)} is none of {', '.join(_CLASSES)}."
        )
    return _CLASSES[text]


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        text = echoed(value.decode("latin-1"))
        raise bad_request("invalid_timeout", f"x-request-timeout: {text} is no number of seconds above 0.")
    return seconds
