"""Claims of a request for its turn: class, weight, and until when its client waits.

The class is that of the tenant in the key file, or a lower one that the request asks for: by
``x-kvatlas-priority``, else by ``x-vllm-priority``, else by ``priority`` in its body. Engines with
priority scheduling read the last two in this order too (vLLM: lower values go first). Without keys all
requests are equal, and each may state its class. With service levels it has a target for its first
token: by ``x-slo-ttft-ms``, else its tenant's, else its class's.
"""

from __future__ import annotations

import math

from kvatlas.router.admission.fair_queue import Priority
from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.openai.errors import bad_request, echoed
from kvatlas.router.openai.numbers import whole_number
from kvatlas.router.openai.request import QueueTicketRequest

PRIORITY, TIMEOUT, TARGET = b"x-kvatlas-priority", b"x-request-timeout", b"x-slo-ttft-ms"
# vLLM reads it before ``priority`` of the body (vllm/entrypoints/generate/base/serving.py, 0.32).
ENGINE_PRIORITY = b"x-vllm-priority"
_CLAIM_FIELDS = frozenset((PRIORITY, ENGINE_PRIORITY, TIMEOUT, TARGET))
Targets = tuple[float | None, float | None, float | None]
"""Milliseconds until the first token, by class: high, normal, low; None: no target."""
_CLASSES = {one.label: one for one in Priority}


def read_claim(
    fields: list[tuple[bytes, bytes]],
    *,
    in_body: int | None,
    arrived_s: float,
    tenant: str = "",
    rules: TenantRules | None = None,
    targets: Targets | None = None,
) -> QueueTicketRequest:
    """Of a request with these header fields, and this ``priority`` in its body. ``targets``
    None: there are no service levels. Raises ``ApiError`` (400)."""
    asked: Priority | None = None
    until_s: float | None = None
    target_ms: float | None = None
    for name, value in fields:
        # Nearly all: one look-up costs half of four comparisons.
        if name not in _CLAIM_FIELDS:
            continue
        if name == PRIORITY:
            asked = _class(value)
        elif name == ENGINE_PRIORITY:
            given = engine_number(value)
            in_body = in_body if given is None else given
        elif name == TIMEOUT:
            until_s = arrived_s + _positive(value, "invalid_timeout", TIMEOUT, "seconds")
        elif name == TARGET and targets is not None:
            target_ms = _positive(value, "invalid_slo", TARGET, "milliseconds")
    if asked is None and in_body is not None:
        asked = Priority.HIGH if in_body < 0 else Priority.LOW if in_body else Priority.NORMAL
    own = Priority.NORMAL if rules is None else _CLASSES[rules.priority]
    priority = own if asked is None else asked if rules is None else max(own, asked)
    if targets is not None and target_ms is None:
        target_ms = targets[priority] if rules is None or rules.slo_ttft_ms is None else rules.slo_ttft_ms
    level_s = None if target_ms is None else target_ms / 1000
    due_s = None if level_s is None else arrived_s + level_s
    if rules is None:
        return QueueTicketRequest(priority=priority, until_s=until_s, level_s=level_s, due_s=due_s)
    return QueueTicketRequest(
        tenant=tenant,
        weight=rules.weight,
        priority=priority,
        until_s=until_s,
        wait_target_s=rules.wait_target(priority),
        level_s=level_s,
        due_s=due_s,
    )


def lowest_priority(rules: TenantRules) -> int | None:
    """The lowest ``priority`` that a tenant's class may give an engine, where lower values come first; None:
    any. vLLM's default, 0, is that of the class between (vllm/v1/core/sched/scheduler.py of 0.32)."""
    own = _CLASSES[rules.priority]
    return None if own is Priority.HIGH else 0 if own is Priority.NORMAL else 1


def capped(fields: list[tuple[bytes, bytes]], rules: TenantRules) -> list[tuple[bytes, bytes]]:
    """These header fields with an ``x-vllm-priority`` that the tenant's class allows."""
    lowest = lowest_priority(rules)
    if lowest is None:
        return fields
    return [
        (name, b"%d" % lowest)
        if name == ENGINE_PRIORITY and ((given := engine_number(value)) is None or given < lowest)
        else (name, value)
        for name, value in fields
    ]


def given_priority(fields: list[tuple[bytes, bytes]], in_body: int | None) -> int:
    """The priority that an engine reads from these header fields, else ``in_body``; 0 without one."""
    for name, value in fields:
        if name == ENGINE_PRIORITY and (given := engine_number(value)) is not None:
            return given
    return in_body or 0


def engine_number(value: bytes) -> int | None:
    """The priority that an engine reads from this header value; None: it ignores it. Raises ``ApiError`` 400
    for one of too many digits."""
    known = whole_number(value.strip(), ENGINE_PRIORITY.decode())
    if known is not None:
        return known
    try:
        number = int(value)
    except ValueError:
        return None
    return whole_number(b"%d" % number, ENGINE_PRIORITY.decode())


def _class(value: bytes) -> Priority:
    text = value.decode("latin-1").strip().lower()
    if text not in _CLASSES:
        raise bad_request(
            "invalid_priority", f"x-kvatlas-priority: {echoed(text)} is none of {', '.join(_CLASSES)}."
        )
    return _CLASSES[text]


def _positive(value: bytes, reason: str, header: bytes, unit: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        text = echoed(value.decode("latin-1"))
        raise bad_request(reason, f"{header.decode()}: {text} is no number of {unit} above 0.")
    return number
