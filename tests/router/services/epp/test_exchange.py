"""One request of a gateway, without one: what it may do wrong, or not do at all. The gateway is the library
``h2`` and the messages of ext_proc."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.pd.settings import KV_SOURCE, PREFILLER, PdSettings
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.engine_order import BAND_MS
from kvatlas.router.proxy.relay import AnswerRelay
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.grpc import GrpcReader, message_frame
from kvatlas.router.services.epp.header_fields import DESTINATION, SUBSET_KEY
from kvatlas.router.services.epp.protobuf import bytes_field, number_field
from kvatlas.router.services.epp.settings import EppSettings, EppStats
from tests.router.services.epp.test_messages import PB, read
from tests.support.h2_peer import H2Peer, h2_peer
from tests.support.pairs import busy
from tests.support.sidecars import completion, endpoint
from tests.support.waiting import until, until_thread
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHAT = b"/v1/chat/completions"
ENDS = {"grpc-status": "0"}
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY = 2, 3, 4, 5


def chat(**changes: Any) -> bytes:
    messages = [{"role": "user", "content": TEXT}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 3, **changes}).encode()


def head(kind: int, fields: dict[bytes, bytes], *, mode: int = m.FULL_DUPLEX) -> bytes:
    each = b"".join(bytes_field(1, bytes_field(1, k) + bytes_field(3, v)) for k, v in fields.items())
    modes = bytes_field(11, number_field(1, mode) + number_field(2, m.FULL_DUPLEX))
    message = bytes_field(kind, bytes_field(1, each)) + (modes if kind == REQUEST_HEADERS else b"")
    return message_frame(message)


def body(kind: int, data: bytes, *, ends: bool = False) -> bytes:
    return message_frame(bytes_field(kind, bytes_field(1, data) + (number_field(2, 1) if ends else b"")))


POST = head(
    REQUEST_HEADERS,
    {b":method": b"POST", b":path": CHAT, b":authority": b"a", b"content-type": b"application/json"},
)
REQUEST = POST + body(REQUEST_BODY, chat()) + body(REQUEST_BODY, b"", ends=True)
OK = head(RESPONSE_HEADERS, {b":status": b"200", b"content-type": b"application/json"})


def messages(peer: H2Peer, number: int) -> list[Any]:
    """Messages of the picker on this stream."""
    return [read(each) for each in GrpcReader(1 << 24).feed(peer.data[number])]


@asynccontextmanager
async def gateway(**changes: Any) -> AsyncIterator[tuple[Rig, H2Peer, SimulatedEngine]]:
    """A router with one engine, and a connection to its picker; in the end no request is left."""
    settings = EppSettings(listen="127.0.0.1:0", tls=False, **changes.pop("epp", {}))
    async with running({}) as (engine,), routing(configure(engine, epp=settings, **changes)) as rig:
        assert rig.router.picker is not None
        async with h2_peer(rig.router.picker.addresses["listen"][1]) as peer:
            yield rig, peer, engine
            await until(lambda: rig.idle, "every request has ended")
            rig.check_books()


def stats_of(rig: Rig) -> EppStats:
    assert rig.router.picker is not None
    return rig.router.picker.stats


async def error_of(peer: H2Peer, number: int) -> tuple[int, str]:
    """Status and code of an answer of the picker's own, and its call's end."""
    await peer.until_over(number)
    own = messages(peer, number)[-1].immediate_response
    assert peer.headers[number][-1] == ENDS
    return own.status.code, json.loads(own.body)["error"]["code"]


async def test_a_request_from_its_head_to_its_receipt() -> None:
    async with gateway() as (rig, peer, engine):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent, and the body given back")
        choice, given = messages(peer, number)
        sets = choice.request_headers.response.header_mutation.set_headers
        fields = {each.header.key: each.header.raw_value.decode() for each in sets}
        endpoint = engine.base_url.removeprefix("http://")
        assert fields[DESTINATION] == choice.dynamic_metadata[m.LB][DESTINATION] == endpoint
        piece = given.request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (chat(), True)
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
        answer = json.dumps({"choices": [], "usage": usage}).encode()
        await peer.send(number, OK + body(RESPONSE_BODY, answer) + body(RESPONSE_BODY, b"", ends=True))
        await peer.until_over(number)
        assert peer.headers[number][-1] == ENDS
        assert messages(peer, number)[-1].response_body.response.body_mutation.streamed_response.end_of_stream
        await until(lambda: rig.idle, "the receipt is written")
        assert rig.router.accounts.receipts.latest[-1].actual_tokens == 0


TARGET_CONFIGS: tuple[tuple[dict[str, Any], dict[bytes, bytes]], ...] = (
    ({"queue": QueueSettings(wait_target_s=3.0)}, {}),
    ({"policy": PolicySettings(service_levels=True, slo_refuse="wait")}, {b"x-slo-ttft-ms": b"3000"}),
)


@pytest.mark.parametrize(("settings", "asked"), TARGET_CONFIGS, ids=["wait-target", "service-level"])
async def test_a_request_whose_predicted_wait_is_too_long_is_refused_immediately(
    settings: dict[str, Any], asked: dict[bytes, bytes]
) -> None:
    async with gateway(**settings) as (rig, peer, _):
        (engine,) = rig.router.fleet
        now = time.monotonic()
        ticket = engine.load.admit(uncached_tokens=1_000_000, now=now, streams=False)
        number = peer.open(PROCESS)
        fields = {b":method": b"POST", b":path": CHAT, b":authority": b"a", **asked}
        sent = head(REQUEST_HEADERS, fields) + body(REQUEST_BODY, chat())
        await peer.send(number, sent + body(REQUEST_BODY, b"", ends=True))
        assert await error_of(peer, number) == (429, "predicted_wait")
        own = messages(peer, number)[-1].immediate_response
        answered = {each.header.key: each.header.raw_value for each in own.headers.set_headers}
        assert 60 < int(answered["retry-after"]) <= 600
        engine.load.fail(ticket, time.monotonic())


@pytest.mark.parametrize(("asked", "band"), [({}, 0), ({b"x-kvatlas-priority": b"low"}, 1)])
async def test_a_gateway_gets_the_priority_of_the_prompt(asked: dict[bytes, bytes], band: int) -> None:
    async with gateway(policy=PolicySettings(engine_priority=2.0)) as (_, peer, _engine):
        number = peer.open(PROCESS)
        fields = {
            b":method": b"POST",
            b":path": CHAT,
            b":authority": b"a",
            b"content-type": b"application/json",
            b"x-vllm-priority": b"5" if band else b"0",
            **asked,
        }
        sent = head(REQUEST_HEADERS, fields) + body(REQUEST_BODY, chat())
        await peer.send(number, sent + body(REQUEST_BODY, b"", ends=True))
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        sets = messages(peer, number)[0].request_headers.response.header_mutation.set_headers
        given = [int(each.header.raw_value) for each in sets if each.header.key == "x-vllm-priority"]
        assert [value // BAND_MS for value in given] == [band]
        await peer.send(number, OK + body(RESPONSE_BODY, b"{}", ends=True))
        await peer.until_over(number)


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("mode", [m.FULL_DUPLEX, m.BUFFERED])
async def test_a_gateway_takes_the_body_with_a_retention_hint_to_the_engine(
    mode: int, *, sidecar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar passes on bodies of requests that it does not split. A client cannot name an engine to it."""
    monkeypatch.setattr("kvatlas.router.fleet.poller.read_obeys_hints", lambda *_: True)
    claim = {"retention_hint": {"ttl_s": 86_400, "owner": "mine"}}

    policy = PolicySettings(retention_hints=True)
    async with gateway(policy=policy, epp={"sidecar": sidecar}) as (rig, peer, _engine):
        (engine,) = rig.router.fleet
        await until(lambda: engine.obeys_hints, "metrics read")
        sent = chat(kv_transfer_params=claim)
        number = peer.open(PROCESS)
        fields = {
            b":method": b"POST",
            b":path": CHAT,
            b":authority": b"a",
            b"content-type": b"application/json",
            b"content-length": b"%d" % len(sent),
            b"x-session-id": b"s",
            KV_SOURCE: b"10.0.0.9:1",
            PREFILLER: b"10.0.0.9:1",
        }
        whole = body(REQUEST_BODY, sent, ends=mode == m.BUFFERED)
        end = b"" if mode == m.BUFFERED else body(REQUEST_BODY, b"", ends=True)
        await peer.send(number, head(REQUEST_HEADERS, fields, mode=mode) + whole + end)
        await until(lambda: len(messages(peer, number)) == 2, "the body is given back")
        told = messages(peer, number)
        given = told[1].request_body.response
        mutation = given.body_mutation
        text = mutation.body if mode == m.BUFFERED else mutation.streamed_response.body
        choice = given if mode == m.BUFFERED else told[0].request_headers.response
        sets = {each.header.key: each.header.raw_value for each in choice.header_mutation.set_headers}
        assert {KV_SOURCE.decode(), PREFILLER.decode()} <= set(choice.header_mutation.remove_headers)
        hint = json.loads(text)["kv_transfer_params"]["retention_hint"]
        assert (hint.keys(), hint["value"]) == ({"ttl_s", "value"}, 0.5)
        assert sets.get("content-length", b"").decode() in ("", str(len(text)))
        assert json.loads(text) == json.loads(chat(kv_transfer_params={"retention_hint": hint}))
        await peer.send(number, OK + body(RESPONSE_BODY, b"{}", ends=True))
        await peer.until_over(number)


@asynccontextmanager
async def gateway_of_a_pair() -> AsyncIterator[tuple[Rig, H2Peer, SimulatedEngine, SimulatedEngine]]:
    """A router with a prefill engine, and a decode engine that is behind a sidecar."""
    settings = EppSettings(listen="127.0.0.1:0", tls=False, sidecar=True)
    splits = PdSettings(min_remote_tokens=64, leg_overhead_s=0.0, transfer_s_per_token=0.0)
    async with running({"role": "prefill"}, {"role": "decode"}) as (p, d):
        addresses = (EngineAddress(one.base_url, role=one.settings.role) for one in (p, d))
        async with routing(configure(*addresses, epp=settings, pd=splits)) as rig:
            assert rig.router.picker is not None
            async with h2_peer(rig.router.picker.addresses["listen"][1]) as peer:
                yield rig, peer, p, d
                await until(lambda: rig.idle, "every request has ended")
                rig.check_books()


async def split(peer: H2Peer, rig: Rig, prompt: int, answer: bytes) -> dict[str, str]:
    """Send a completion of a new prompt, answer it, and return the fields that the picker added."""
    number = peer.open(PROCESS)
    fields = {b":method": b"POST", b":path": b"/v1/completions", b":authority": b"a"}
    sent = json.dumps(completion(prompt)).encode()
    with busy(rig):
        await peer.send(number, head(REQUEST_HEADERS, fields) + body(REQUEST_BODY, sent, ends=True))
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        choice, given = messages(peer, number)
        assert given.request_body.response.body_mutation.streamed_response.body == sent
        await peer.send(number, answer)
        await peer.until_over(number)
    sets = choice.request_headers.response.header_mutation.set_headers
    return {each.header.key: each.header.raw_value.decode() for each in sets}


async def test_a_sidecar_is_named_one_prefill_engine() -> None:
    usage = {"prompt_tokens": 700, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = json.dumps({"choices": [], "usage": usage}).encode()
    async with gateway_of_a_pair() as (rig, peer, p, d):
        given = await split(peer, rig, 1, OK + body(RESPONSE_BODY, answer, ends=True))
        assert (given[DESTINATION], given[PREFILLER.decode()]) == (endpoint(d), endpoint(p))
        assert rig.router.proxy.pd_stats.split == 1
        await until(lambda: rig.idle, "the receipts are written")
        told = {one.leg: (one.engine_id, one.outcome) for one in rig.router.accounts.receipts.latest}
        assert told == {"prefill": (p.base_url, "unreported"), "decode": (d.base_url, "unpredicted")}


@pytest.mark.parametrize(("status", "expected"), [(b"500", [False]), (b"502", [False]), (b"400", [])])
async def test_an_error_of_a_split_request_counts_against_the_prefill_engine(
    status: bytes, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode engine would be out of use soon, if one bad prefill engine counted against them."""
    failed = head(RESPONSE_HEADERS, {b":status": status}) + body(RESPONSE_BODY, b"{}", ends=True)
    async with gateway_of_a_pair() as (rig, peer, p, d):
        told: dict[str, list[bool]] = {p.base_url: [], d.base_url: []}

        def listen(url: str) -> None:
            def record(ok: bool, now: float, *, connection: bool = True) -> None:
                told[url].append(ok)

            monkeypatch.setattr(rig.router.fleet.get(url).breaker, "record", record)

        for url in told:
            listen(url)
        await split(peer, rig, 1, failed)
        await until(lambda: rig.idle, "the request has ended")
        assert told[p.base_url] == expected
        assert False not in told[d.base_url]


async def test_a_gateways_requests_have_a_line_of_the_usage_record_each(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    async with gateway(usage=UsageSettings(path=str(path))) as (rig, peer, engine):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent, and the body given back")
        answer = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}'
        await peer.send(number, OK + body(RESPONSE_BODY, answer) + body(RESPONSE_BODY, b"", ends=True))
        await peer.until_over(number)
        broken = peer.open(PROCESS)
        await peer.send(broken, POST + body(REQUEST_BODY, b"{", ends=True))
        assert (await error_of(peer, broken))[0] == 400
        log = rig.router.usage
        assert log is not None
        await until_thread(lambda: log.stats.written == 2, "both lines are written")
        url = engine.base_url
    served, refused = [json.loads(line) for line in path.read_text().splitlines()]
    assert (served["status"], served["engine"], served["generated_tokens"]) == (200, url, 3)
    assert (refused["status"], refused["engine"]) == (400, "")


@pytest.mark.parametrize(("value", "refused"), [(b"60000", False), (b"soon", True)])
async def test_a_service_level_is_read_from_a_gateways_request(value: bytes, *, refused: bool) -> None:
    async with gateway(policy=PolicySettings(service_levels=True)) as (rig, peer, _):
        fields = {b":method": b"POST", b":path": CHAT, b":authority": b"a", b"x-slo-ttft-ms": value}
        number = peer.open(PROCESS)
        sent = body(REQUEST_BODY, chat()) + body(REQUEST_BODY, b"", ends=True)
        await peer.send(number, head(REQUEST_HEADERS, fields) + sent)
        if refused:
            assert await error_of(peer, number) == (400, "invalid_slo")
            return
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        assert rig.router.accounts.slo_stats.decisions == 1
        answer = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}'
        await peer.send(number, OK + body(RESPONSE_BODY, answer) + body(RESPONSE_BODY, b"", ends=True))
        await peer.until_over(number)
        await until(lambda: rig.idle, "the receipt is written")
        assert 0 < (rig.router.accounts.receipts.latest[-1].slo_ttft_s or 0) <= 60


async def test_a_slash_at_the_end_and_a_redirect_are_handled_for_a_gateway_too() -> None:
    async with gateway() as (_, peer, engine):
        number = peer.open(PROCESS)
        sent = head(REQUEST_HEADERS, {b":method": b"POST", b":path": CHAT + b"/?a=b", b":authority": b"a"})
        await peer.send(number, sent + body(REQUEST_BODY, chat()) + body(REQUEST_BODY, b"", ends=True))
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        sets = messages(peer, number)[0].request_headers.response.header_mutation.set_headers
        fields = {each.header.key: each.header.raw_value for each in sets}
        assert fields[":path"] == CHAT + b"?a=b"
        location = f"{engine.base_url}{CHAT.decode()}".encode()
        moved = head(RESPONSE_HEADERS, {b":status": b"307", b"location": location})
        await peer.send(number, moved + body(RESPONSE_BODY, b"", ends=True))
        assert await error_of(peer, number) == (404, "path_not_found")
        assert location not in bytes(peer.data[number])


async def test_a_gateway_removes_the_location_of_another_answer() -> None:
    async with gateway() as (_, peer, engine):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        made = head(RESPONSE_HEADERS, {b":status": b"201", b"location": engine.base_url.encode()})
        await peer.send(number, made + body(RESPONSE_BODY, b"{}", ends=True))
        await peer.until_over(number)
        shown = messages(peer, number)[2].response_headers.response.header_mutation
        assert list(shown.remove_headers) == ["location"]


def given_back(peer: H2Peer, number: int) -> tuple[bytes, bool]:
    """The answer's body as the gateway has it, and whether it is whole."""
    pieces = [
        each.response_body.response.body_mutation.streamed_response for each in messages(peer, number)[3:]
    ]
    return b"".join(piece.body for piece in pieces), pieces[-1].end_of_stream


async def test_an_answer_goes_on_before_the_router_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, reads = asyncio.Event(), AnswerRelay.run

    async def late(relay: AnswerRelay, *given: Any) -> None:
        await busy.wait()
        if (rest := reads(relay, *given)) is not None:
            await rest

    monkeypatch.setattr(AnswerRelay, "run", late)
    async with gateway() as (rig, peer, _):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        (record,) = rig.router.proxy.requests.live
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
        answer = json.dumps({"choices": [], "usage": usage}).encode()
        await peer.send(number, OK + body(RESPONSE_BODY, answer) + body(RESPONSE_BODY, b"", ends=True))
        await peer.until_over(number)
        assert given_back(peer, number) == (answer, True)
        sets = messages(peer, number)[2].response_headers.response.header_mutation.set_headers
        told = {each.header.key: each.header.raw_value for each in sets}
        assert told["x-request-id"] == record.request_id.encode()
        assert peer.headers[number][-1] == ENDS
        assert not rig.idle
        busy.set()
        await until(lambda: rig.idle, "the receipt is written")
        assert rig.router.accounts.receipts.latest[-1].actual_tokens == 0
        assert rig.router.proxy.stats.clients_gone == 0


async def test_an_error_of_an_engine_waits_for_the_router() -> None:
    async with gateway() as (_, peer, _):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        await until(lambda: len(messages(peer, number)) == 2, "the choice is sent")
        await peer.send(number, head(RESPONSE_HEADERS, {b":status": b"500"}) + body(RESPONSE_BODY, b'{"a'))
        after = peer.open("/unknown", end=True)
        await peer.until_over(after)
        assert len(messages(peer, number)) == 2
        await peer.send(number, body(RESPONSE_BODY, b'":1}', ends=True))
        await peer.until_over(number)
        assert given_back(peer, number) == (b'{"a":1}', True)


WRONG = {
    "an answer before its request": (OK, "3", "malformed"),
    "two heads": (POST + POST, "3", "malformed"),
    "a body behind its end": (REQUEST + body(REQUEST_BODY, b"more"), "3", "malformed"),
    "compressed": (b"\1\0\0\0\1x", "12", "malformed"),
    "cut": (message_frame(b"\x22\x05ab"), "3", "malformed"),
    "longer than any body may be": (b"\0\xff\xff\xff\xff", "8", "malformed"),
    "a mode that cannot work": (head(REQUEST_HEADERS, {b":method": b"POST"}, mode=m.STREAMED), "9", "mode"),
}


@pytest.mark.parametrize(("sent", "status", "reason"), WRONG.values(), ids=WRONG)
async def test_a_gateway_that_breaks_the_protocol_gets_an_error(
    sent: bytes, status: str, reason: str
) -> None:
    async with gateway() as (rig, peer, _):
        number = peer.open(PROCESS)
        await peer.send(number, sent)
        await peer.until_over(number)
        assert peer.headers[number][-1]["grpc-status"] == status
        assert stats_of(rig).calls_refused == {reason: 1}
        assert not peer.closed  # nor is any other call of its connection ended


@pytest.mark.parametrize("listed", [False, True], ids=["text", "list"])
async def test_a_subset_hint_of_comma_joined_endpoints(*, listed: bool) -> None:
    """Gateways that copy it from a header send one text (lwepp, handlers/request.go)."""

    async with gateway() as (_, peer, engine):
        endpoint = engine.base_url.removeprefix("http://")
        for text, chosen in ((f"10.0.0.9:1, {endpoint}", True), ("10.0.0.9:1,10.0.0.8:1", False)):
            asked = PB["ProcessingRequest"]()
            asked.ParseFromString(next(iter(GrpcReader(1 << 20).feed(POST))))
            hint = asked.metadata_context.filter_metadata.add(key=m.SUBSET).value
            if listed:
                hint.get_or_create_list(SUBSET_KEY).extend([text])
            else:
                hint[SUBSET_KEY] = text
            number = peer.open(PROCESS)
            await peer.send(number, message_frame(asked.SerializeToString()) + REQUEST.removeprefix(POST))
            await until(partial(messages, peer, number), "answered")
            if chosen:
                assert messages(peer, number)[0].dynamic_metadata[m.LB][DESTINATION] == endpoint
                peer.state.reset_stream(number)
                peer.flush()
            else:
                assert (await error_of(peer, number))[0] == 503


def gateways_own(status: bytes) -> bytes:
    return head(RESPONSE_HEADERS, {b":status": status, b"content-type": b"text/plain"})


@pytest.mark.parametrize("mode", [m.FULL_DUPLEX, m.BUFFERED])
async def test_an_answer_of_the_gateways_own_before_the_choice_goes_to_the_client(mode: int) -> None:
    """Envoy's 413 of a body that it cannot buffer, its 504 of stream_idle_timeout: neither is a fault."""

    async with gateway() as (rig, peer, _):
        number = peer.open(PROCESS)
        fields = {b":method": b"POST", b":path": CHAT, b":authority": b"a"}
        await peer.send(number, head(REQUEST_HEADERS, fields, mode=mode))
        if mode == m.FULL_DUPLEX:
            await peer.send(number, body(REQUEST_BODY, b'{"model"'))
        await peer.send(number, gateways_own(b"413") + body(RESPONSE_BODY, b"Payload "))
        await until(lambda: rig.idle, "the request has ended")
        await peer.send(number, body(RESPONSE_BODY, b"Too Large", ends=True))
        await peer.until_over(number)
        assert peer.headers[number][-1] == ENDS
        found = messages(peer, number)
        kinds = [field.name for each in found for field, _ in each.ListFields()]
        assert kinds[-3:] == ["response_headers", "response_body", "response_body"]
        assert "immediate_response" not in kinds
        assert not found[-3].response_headers.response.header_mutation.set_headers
        pieces = [one.response_body.response.body_mutation.streamed_response for one in found[-2:]]
        assert b"".join(piece.body for piece in pieces) == b"Payload Too Large"
        assert pieces[-1].end_of_stream
        stats = stats_of(rig)
        assert (stats.gateways_own, stats.calls_refused, stats.immediate) == (1, {}, 0)
        assert rig.router.proxy.stats.engine_failures == {}


async def test_an_answer_of_the_gateways_own_while_the_request_waits() -> None:
    one_at_a_time = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    async with gateway(queue=one_at_a_time) as (rig, peer, _):
        first, waits = peer.open(PROCESS), peer.open(PROCESS)
        await peer.send(first, REQUEST)
        await until(lambda: len(messages(peer, first)) == 2, "the choice is sent")
        other = chat(messages=[{"role": "user", "content": "nothing of it is in flight"}])
        await peer.send(waits, POST + body(REQUEST_BODY, other) + body(REQUEST_BODY, b"", ends=True))
        await until(lambda: rig.router.accounts.room.stats.waiting == 1, "one waits")
        await peer.send(waits, gateways_own(b"504"))
        await until(lambda: rig.router.proxy.stats.requests_active == 1, "it has left")
        await peer.send(waits, body(RESPONSE_BODY, b"stream timeout", ends=True))
        await peer.until_over(waits)
        assert (peer.headers[waits][-1], stats_of(rig).gateways_own) == (ENDS, 1)
        peer.state.reset_stream(first)
        peer.flush()


async def test_a_silent_gateway_is_not_waited_for() -> None:
    async with gateway(epp={"request_timeout_s": 0.1}) as (rig, peer, _):
        silent = peer.open(PROCESS)
        await peer.until_over(silent)
        assert peer.headers[silent][-1]["grpc-status"] == "3"
        assert stats_of(rig).calls_refused == {"timeout": 1}
        half = peer.open(PROCESS)
        await peer.send(half, POST + body(REQUEST_BODY, b'{"model"'))
        assert await error_of(peer, half) == (408, "request_timeout")


async def test_an_engine_that_does_not_answer_is_an_error_in_time() -> None:
    """A gateway in full duplex bounds nothing: this does."""

    quick = ProxySettings(first_byte_timeout_s=0.1)
    async with gateway(proxy=quick) as (rig, peer, _):
        number = peer.open(PROCESS)
        await peer.send(number, REQUEST)
        assert (await error_of(peer, number))[0] == 504
        assert rig.router.proxy.stats.engine_failures == {"timeout": 1}


async def test_bodies_are_bounded_one_by_one_and_together() -> None:
    bounds = {
        "proxy": ProxySettings(body_bytes_max=20_000),
        "listen": ListenSettings(drain_s_max=5.0, bodies_bytes_max=50_000),
    }
    async with gateway(**bounds) as (rig, peer, _):
        long = peer.open(PROCESS)
        await peer.send(long, POST + body(REQUEST_BODY, bytes(20_001)))
        assert (await error_of(peer, long))[0] == 413
        held = [peer.open(PROCESS) for _ in range(3)]
        for number in held:
            await peer.send(number, POST + body(REQUEST_BODY, bytes(18_000)))
        await until(lambda: bool(peer.ended), "there is no room for the last one")
        await until(lambda: held[-1] in peer.ended, "it is the last one")
        (own,) = [each.immediate_response for each in messages(peer, held[-1])]
        told = {each.header.key: each.header.raw_value for each in own.headers.set_headers}
        assert (own.status.code, told["x-llm-d-request-dropped-reason"]) == (503, b"rejected-saturated")
        for number in held[:-1]:
            peer.state.reset_stream(number)
        peer.flush()
        await until(lambda: stats_of(rig).streams_open == 0, "the others have left")
        again = peer.open(PROCESS)
        await peer.send(again, REQUEST)
        await until(lambda: len(messages(peer, again)) == 2, "there is room again")
        peer.state.reset_stream(again)
        peer.flush()
