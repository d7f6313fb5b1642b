"""Requests that no application sees: each answer has an id, and a log line has it too."""

from __future__ import annotations

import re

import pytest
import structlog

from kvatlas.router.http.refusal_log import RefusalLog
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.openai.errors import bad_request
from tests.support.proxy_rig import read_answer, routing

SHORT = ListenSettings(header_timeout_s=0.05, body_timeout_s=0.05)
BAD = {
    "no HTTP": (b"what is this\r\n\r\n", 400),
    "no host": (b"GET /v1/x HTTP/1.1\r\n%b\r\n", 400),
    "bad field": (b"GET /v1/x HTTP/1.1\r\nhost: a\r\n%bbad field\r\n\r\n", 400),
    "tunnel": (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n%b\r\n", 405),
    "large head": (b"GET /v1/x HTTP/1.1\r\nhost: a\r\n%bx: " + b"y" * 100_000 + b"\r\n\r\n", 431),
    "slow head": (b"GET /v1/x HTTP/1.1\r\nhost: a\r\n%b", 408),
    "slow body": (b"POST /v1/x HTTP/1.1\r\nhost: a\r\n%bcontent-length: 9\r\n\r\n{", 408),
}


@pytest.mark.parametrize("given", [b"", b"x-request-id: mine\r\nx-b: 1\r\n", b"x-request-id: a b\xff\r\n"])
@pytest.mark.parametrize("kind", BAD)
async def test_early_refusals_have_an_id_and_a_log_line(kind: str, given: bytes) -> None:
    raw, status = BAD[kind]
    with structlog.testing.capture_logs() as logs:
        async with routing(listen=SHORT) as rig:
            reader, writer = await rig.connect()
            writer.write(raw.replace(b"%b", given))
            got = await read_answer(reader)
    assert got.status == status
    request_id = got.head["x-request-id"]
    known = b"mine" in given and kind != "no HTTP"
    assert request_id == "mine" if known else re.fullmatch("[0-9a-f]{32}", request_id)
    lines = [line for line in logs if line["event"] == "request refused"]
    assert [(line["request_id"], line["status"], line["code"]) for line in lines] == [
        (request_id, status, got.json()["error"]["code"])
    ]


def test_a_flood_of_them_is_counted_in_a_few_lines() -> None:
    now = [0.0]
    log = RefusalLog(lambda: now[0])
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            log.note(bad_request("invalid_http", "x"), b"id", client="::1")
        now[0] = 1.0
        log.note(bad_request("invalid_http", "x"), b"id", client="::1")
    assert len(logs) == 11
    assert logs[-1]["unsaid"] == 90
