"""The messages, against the protobuf runtime with the fields of Envoy's API, and fuzzed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.openai import errors
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.grpc import GrpcError, GrpcReader, message_frame
from kvatlas.router.services.epp.immediate import immediate_answer
from kvatlas.router.services.epp.metadata import endpoints
from kvatlas.router.services.epp.protobuf import ProtobufError, bytes_field
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
    split = [each.strip() for text in subset or () for each in text.split(",")]
    listed = tuple(each for each in split if each)
    assert endpoints(found.metadata, m.SUBSET, "endpoints") == (None if subset is None else listed)
    assert endpoints(found.metadata, m.SUBSET, "other") is None


@settings(max_examples=examples(60))
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


@settings(max_examples=examples(60))
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


def test_pieces_trailers_and_immediate_answers() -> None:
    for body, ends in ((b"abc", True), (b"", True), (b"abc", False), (bytes(62_000), True)):
        before, behind = m.around_piece("response_body", len(body), ends=ends)
        streamed = read(before + body + behind).response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (body, ends)
    assert read(m.unchanged("request_trailers")).HasField("request_trailers")
    own = read(m.immediate(503, [(b"retry-after", b"1")], b"{}", "why")).immediate_response
    assert (own.status.code, own.body, own.details) == (503, b"{}", "why")
    assert own.headers.set_headers[0].header.raw_value == b"1"


@settings(max_examples=examples(300))
@given(st.binary(max_size=80))
def test_whatever_comes_is_read_or_refused(message: bytes) -> None:
    try:
        found = m.read_request(message)
        endpoints(found.metadata, m.LB, "x")
    except ProtobufError:
        return
    assert found.kind is None or message


@settings(max_examples=examples(1000))
@given(
    st.sampled_from(["request_headers", "request_body", "response_body"]),
    st.integers(0, 5).map(bytes) | st.integers(120, 130).map(bytes),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 255)), max_size=2),
)
def test_unusual_encodings_are_read_as_the_runtime_reads_them(
    kind: str, data: bytes, ends: bool, wrong: list[tuple[int, int]]
) -> None:
    """Messages written as usual are read by a shorter way: whatever a byte may be, it says the same."""
    sent = PB["ProcessingRequest"]()
    sent.metadata_context.filter_metadata.add(key="x")
    part = getattr(sent, kind)
    part.end_of_stream = ends
    if kind == "request_headers":
        for name in ("a", "content-type", "b" * len(data)):
            part.headers.headers.add(key=name, raw_value=data)
    else:
        part.body = data
    message = bytearray(sent.SerializeToString())
    for at, byte in wrong:
        message[at % len(message)] = byte
    try:
        expected = PB["ProcessingRequest"].FromString(bytes(message))
        found = m.read_request(bytes(message))
    except (DecodeError, ProtobufError):
        return
    if found.kind is None:
        return
    part = getattr(expected, found.kind)
    if found.kind.endswith("body"):
        assert (found.body, found.end_of_stream) == (part.body, part.end_of_stream)
    elif found.kind.endswith("headers"):
        told = [
            (each.key.encode().lower(), each.raw_value or each.value.encode())
            for each in part.headers.headers
        ]
        assert (found.headers, found.end_of_stream) == (told, part.end_of_stream)


def test_odd_bodies_and_fields() -> None:
    with pytest.raises(ProtobufError):
        m.read_request(b"\x22\x02\n\x02B\0")  # a body that is longer than what it is in
    for first in (b"\x22\x02\x10\x01", b"\x2a\x02\x10\x01", b"\x12\0"):
        with pytest.raises(ProtobufError, match="and request_body in one message"):
            m.read_request(first + b"\x22\x03\n\x01x")
    for entry, value in (
        (b"\n\x01k\x1a\x01b\x1a\x01c", b"c"),  # twice: the last one counts
        (b"\n\x01k\x12\x01t", b"t"),  # as text
        (b"\x1a\x01v\n\x01k", b"v"),  # the other way round
        (b"\n\x01k", b""),
    ):
        headers = bytes_field(1, bytes_field(1, entry))
        assert m.read_request(bytes_field(2, headers)).headers == [(b"k", value)]


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
    fields = [(b"content-length", b"9"), *error.headers]
    found = read(immediate_answer(error.status, fields, error.body())).immediate_response
    told = {option.header.key: option.header.raw_value for option in found.headers.set_headers}
    assert told.get("x-llm-d-request-dropped-reason") == reason
    assert (found.status.code, found.body) == (error.status, error.body())
    assert "content-length" not in told


def _nested(depth: int) -> bytes:
    """Metadata whose subset hint is a text within this many lists."""
    value = bytes_field(3, b"10.0.0.1:8000")
    for _ in range(depth):
        value = bytes_field(6, bytes_field(1, value))
    member = bytes_field(1, bytes_field(1, b"endpoints") + bytes_field(2, value))
    return bytes_field(1, bytes_field(1, m.SUBSET.encode()) + bytes_field(2, member))


def test_lists_within_lists_are_read_to_a_depth() -> None:
    assert endpoints(_nested(1), m.SUBSET, "endpoints") == ("10.0.0.1:8000",)
    for depth in (20, 5000):
        with pytest.raises(ProtobufError, match="deep"):
            endpoints(_nested(depth), m.SUBSET, "endpoints")


@pytest.mark.parametrize(
    "message",
    [
        b"\x08\x01" * 20_000,  # fields that are not known here
        bytes_field(2, bytes_field(1, bytes_field(1, b"") * 20_000)),  # empty header fields
        bytes_field(2, bytes_field(1, bytes_field(1, b"") * 3000) * 100),
        bytes_field(8, bytes(200_000)) * 2,
    ],
    ids=["fields", "headers", "maps of headers", "metadata"],
)
def test_a_message_of_many_fields_is_refused(message: bytes) -> None:
    with pytest.raises(ProtobufError, match="more than"):
        m.read_request(message)
