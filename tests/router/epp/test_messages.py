"""The messages, against the protobuf runtime with the fields of Envoy's API, and fuzzed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from router.epp.request.own_answer import own_answer
from router.epp.wire import messages as m
from router.epp.wire.grpc import GrpcError, GrpcReader, message_frame
from router.epp.wire.protobuf import ProtobufError
from router.openai import errors
from tests.support.examples import examples

_TYPES = {"bytes": 12, "string": 9, "bool": 8, "int32": 5}
_SCHEMA: dict[str, dict[int, tuple[str, str]]] = {
    "HeaderValue": {1: ("key", "string"), 2: ("value", "string"), 3: ("raw_value", "bytes")},
    "HeaderMap": {1: ("*headers", "HeaderValue")},
    "HttpHeaders": {1: ("headers", "HeaderMap"), 3: ("end_of_stream", "bool")},
    "HttpBody": {1: ("body", "bytes"), 2: ("end_of_stream", "bool")},
    "Trailers": {1: ("trailers", "HeaderMap")},
    "Entry": {1: ("key", "string"), 2: ("value", "Struct")},
    "Metadata": {1: ("*filter_metadata", "Entry")},
    "ProtocolConfiguration": {1: ("request_body_mode", "int32"), 2: ("response_body_mode", "int32")},
    "ProcessingRequest": {
        2: ("request_headers", "HttpHeaders"),
        3: ("response_headers", "HttpHeaders"),
        4: ("request_body", "HttpBody"),
        5: ("response_body", "HttpBody"),
        6: ("request_trailers", "Trailers"),
        7: ("response_trailers", "Trailers"),
        8: ("metadata_context", "Metadata"),
        10: ("observability_mode", "bool"),
        11: ("protocol_config", "ProtocolConfiguration"),
        99: ("of_a_later_version", "Metadata"),
    },
    "HeaderValueOption": {1: ("header", "HeaderValue"), 3: ("append_action", "int32")},
    "HeaderMutation": {1: ("*set_headers", "HeaderValueOption"), 2: ("*remove_headers", "string")},
    "StreamedBodyResponse": {1: ("body", "bytes"), 2: ("end_of_stream", "bool")},
    "BodyMutation": {1: ("body", "bytes"), 3: ("streamed_response", "StreamedBodyResponse")},
    "CommonResponse": {
        2: ("header_mutation", "HeaderMutation"),
        3: ("body_mutation", "BodyMutation"),
        5: ("clear_route_cache", "bool"),
    },
    "HeadersResponse": {1: ("response", "CommonResponse")},
    "HttpStatus": {1: ("code", "int32")},
    "ImmediateResponse": {
        1: ("status", "HttpStatus"),
        2: ("headers", "HeaderMutation"),
        3: ("body", "bytes"),
        5: ("details", "string"),
    },
    "ProcessingResponse": {
        1: ("request_headers", "HeadersResponse"),
        2: ("response_headers", "HeadersResponse"),
        3: ("request_body", "HeadersResponse"),
        4: ("response_body", "HeadersResponse"),
        5: ("request_trailers", "Trailers"),
        6: ("response_trailers", "Trailers"),
        7: ("immediate_response", "ImmediateResponse"),
        8: ("dynamic_metadata", "Struct"),
    },
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="picker.proto", package="picker", syntax="proto3", dependency=["google/protobuf/struct.proto"]
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in fields.items():
            added = message.field.add(name=field.lstrip("*"), number=number)
            added.label = 3 if field.startswith("*") else 1
            if kind in _TYPES:
                added.type = _TYPES[kind]  # type: ignore[assignment]
            else:
                added.type = 11  # type: ignore[assignment]
                added.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".picker.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"picker.{name}")) for name in _SCHEMA}


PB = _classes()
NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)
FIELDS = st.lists(st.tuples(NAMES, st.binary(min_size=1, max_size=40)), max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(FIELDS, st.booleans(), st.lists(st.text(max_size=20), max_size=3) | st.none(), st.integers(0, 5))
def test_request_headers(
    fields: list[tuple[str, bytes]], ends: bool, subset: list[str] | None, mode: int
) -> None:
    sent = PB["ProcessingRequest"]()
    sent.request_headers.end_of_stream = ends
    for name, value in fields:
        sent.request_headers.headers.headers.add(key=name, raw_value=value)
    sent.protocol_config.request_body_mode = mode
    sent.of_a_later_version.filter_metadata.add(key="x")
    if subset is not None:
        entry = sent.metadata_context.filter_metadata.add(key=m.SUBSET)
        entry.value.get_or_create_list("endpoints").extend(subset)
    found = m.read_request(sent.SerializeToString())
    assert found.kind == "request_headers"
    assert found.headers == [(name.encode(), value) for name, value in fields]
    assert found.end_of_stream == ends
    assert found.modes == m.Modes(mode, 0)
    assert m.endpoints(found.metadata, m.SUBSET, "endpoints") == subset
    assert m.endpoints(found.metadata, m.SUBSET, "other") is None


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(["request_body", "response_body"]), st.binary(max_size=300), st.booleans())
def test_bodies(kind: str, data: bytes, ends: bool) -> None:
    sent = PB["ProcessingRequest"]()
    getattr(sent, kind).body = data
    getattr(sent, kind).end_of_stream = ends
    found = m.read_request(sent.SerializeToString())
    assert (found.kind, found.body, found.end_of_stream) == (kind, data, ends)


def read(message: bytes) -> Any:
    found = PB["ProcessingResponse"]()
    found.ParseFromString(message)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(FIELDS, st.lists(NAMES, max_size=3), st.text(max_size=40))
def test_a_choice_is_what_the_runtime_reads(
    fields: list[tuple[str, bytes]], removes: list[str], endpoint: str
) -> None:
    headers = m.header_mutation([(n.encode(), v) for n, v in fields], [n.encode() for n in removes])
    common = m.common_response(headers=headers, body=b"changed", clear_route_cache=True)
    made = m.answer("request_body", common=common, metadata=m.dynamic_metadata(m.LB, "key", endpoint))
    found = read(made)
    told = found.request_body.response
    assert [(f.header.key, f.header.raw_value) for f in told.header_mutation.set_headers] == fields
    first = {name: at for at, (name, _) in reversed(list(enumerate(fields)))}
    for at, option in enumerate(told.header_mutation.set_headers):
        assert option.append_action == (2 if first[option.header.key] == at else 0)  # replaces, then adds
    assert list(told.header_mutation.remove_headers) == removes
    assert told.clear_route_cache
    assert told.body_mutation.body == b"changed"
    assert found.dynamic_metadata[m.LB]["key"] == endpoint


def test_pieces_trailers_and_own_answers() -> None:
    piece = read(m.answer("response_body", common=m.streamed_body(b"abc", end_of_stream=True)))
    streamed = piece.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)
    assert read(m.trailers_answer("request_trailers")).HasField("request_trailers")
    own = read(m.immediate(503, [(b"retry-after", b"1")], b"{}", "why")).immediate_response
    assert (own.status.code, own.body, own.details) == (503, b"{}", "why")
    assert own.headers.set_headers[0].header.raw_value == b"1"


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=80))
def test_whatever_comes_is_read_or_refused(message: bytes) -> None:
    try:
        found = m.read_request(message)
        m.endpoints(found.metadata, m.LB, "x")
    except ProtobufError:
        return
    assert found.kind is None or message


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 9))
def test_grpc_messages_come_out_whole(sent: list[bytes], size: int) -> None:
    data = b"".join(map(message_frame, sent))
    reader, found = GrpcReader(100), []
    for at in range(0, len(data), size):
        found += reader.feed(data[at : at + size])
    assert found == sent


@pytest.mark.parametrize("head", [b"\x01\0\0\0\x01", b"\0\0\0\0\x65"])
def test_compressed_and_long_messages_are_refused_by_their_head(head: bytes) -> None:
    with pytest.raises(GrpcError):
        GrpcReader(100).feed(head)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.no_ready_engine("none"), b"rejected-no-endpoints"),
        (errors.queue_timeout(3.0, "wait_s_max", 1.0), b"rejected-ttl-expired"),
        (errors.queue_full(10, 1.0), b"rejected-saturated"),
        (errors.too_many_bodies(), b"rejected-saturated"),
        (errors.model_not_found("x"), None),
    ],
)
def test_errors_say_why_a_request_was_dropped(error: errors.ApiError, reason: bytes | None) -> None:
    start = {"status": error.status, "headers": [(b"content-length", b"9"), *error.headers]}
    found = read(own_answer(start, error.body())).immediate_response
    told = {option.header.key: option.header.raw_value for option in found.headers.set_headers}
    assert told.get("x-llm-d-request-dropped-reason") == reason
    assert (found.status.code, found.body) == (error.status, error.body())
    assert "content-length" not in told
