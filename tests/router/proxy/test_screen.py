"""Fields kept from engines: ``kv_transfer_params`` of clients, wherever vLLM would read it; nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.body import peek
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.guarded import REFUSED, REMOVED
from kvatlas.router.openai.members import at_once, run_cooperatively
from kvatlas.router.proxy.media_names import names_media
from kvatlas.router.proxy.screen import Rules, screen
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.proxy_rig import Engine, ask, request, routing, says

BAD = b'{"do_remote_prefill":true}'
GONE = [
    (b'{"kv_transfer_params":%b}', b"{}"),
    (b'{ "model":"m", "kv_transfer_params" : %b }', b'{ "model":"m" }'),
    (b'{"kv_transfer_params":%b , "model" :"m" } ', b'{"model" :"m" } '),
    (b'{"a":1, "kv_transfer_params":%b,\n "b":1.50}', b'{"a":1, "b":1.50}'),
    (b'{"a":1,"kv_transfer_params":%b,"kv_transfer_params":1}', b'{"a":1}'),
    (b'{"kv_transfer_params":1,"a":[{}],"kv_transfer_params":%b}', b'{"a":[{}]}'),
    (b'{"kv\\u005ftransfer_params":%b,"a":"\\u00e9"}', b'{"a":"\\u00e9"}'),
    (b'{"\\u006b\\u0076_transfer_params":%b}', b"{}"),
    (b'{"vllm_xargs":{"kv_transfer_params":%b,"top":[1, 2]}}', b'{"vllm_xargs":{"top":[1, 2]}}'),
    (b'{"a":NaN,"kv_transfer_params":%b,"b":-Infinity}', b'{"a":NaN,"b":-Infinity}'),
    (b'\xef\xbb\xbf{"kv_transfer_params":%b,"a":1}', b'\xef\xbb\xbf{"a":1}'),
    (b'{"a":"\xed\xa0\x80","kv_transfer_params":%b}', b'{"a":"\xed\xa0\x80"}'),
    (b'{"a":"\\ud800","kv_transfer_params":%b}', b'{"a":"\\ud800"}'),
    (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b',"kv_transfer_params":%b}', None),
    (b'{"ec_transfer_params":%b,"a":1}', b'{"a":1}'),
    (
        b'{"sampling_params":{"extra_args":{"ec_transfer_params":%b}}}',
        b'{"sampling_params":{"extra_args":{}}}',
    ),
    (b'{"vllm_xargs":{"ec\\u005ftransfer_params":%b}}', b'{"vllm_xargs":{}}'),
    (b" " * 100 + b'{"kv_transfer_params":%b}', b" " * 100 + b"{}"),
]
STAY = [
    b'{"messages":[{"kv_transfer_params":1}],"x":{"kv_transfer_params":{}}}',
    b'{"x":"\\"kv_transfer_params\\":1","y":"kv_transfer_params","kv_transfer_paramsX":1}',
    b'{"vllm_xargs":{"x":{"kv_transfer_params":1}},"vllm_xargs":"kv_transfer_params"}',
    b'[{"kv_transfer_params":1}]',
    b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n{"kv_transfer_params":1}\r\n--x--',
    b"",
]


def _screened(body: bytes) -> bytes:
    return bytes(at_once(screen(body, Rules())).body)


@pytest.mark.parametrize(("body", "left"), GONE)
def test_field_is_taken_out_with_its_comma(body: bytes, left: bytes | None) -> None:
    body = body.replace(b"%b", BAD)
    wanted = body.replace(b',"kv_transfer_params":' + BAD, b"") if left is None else left
    assert _screened(body) == wanted


@pytest.mark.parametrize("body", STAY)
def test_everything_else_stays(body: bytes) -> None:
    assert _screened(body) == body


async def test_engine_never_sees_it() -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        body = b'{"model":"m","kv_transfer_params":%b,"messages":[]}' % BAD
        kinds = [b"content-type: application/json", b"content-type: text/plain", b"x-kind: none"]
        for count, (path, kind) in enumerate(itertools.product(paths, kinds), 1):
            lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: a", b"content-length: %d" % len(body), kind]
            assert (await ask(rig, b"\r\n".join(lines) + b"\r\n\r\n" + body)).status == 200, (path, kind)
            call = engine.calls.pop()
            assert call.body == b'{"model":"m","messages":[]}', (path, kind)
            assert call.head["content-length"] == str(len(call.body)), (path, kind)
            assert rig.stats.kv_transfer_params_removed == count, (path, kind)


@pytest.mark.parametrize("size", [0, 5 << 20], ids=["small", "above 4 MiB"])
async def test_neither_kind_of_transfer_reaches_an_engine(size: int) -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate"]
    names = ["kv_transfer_params", "ec_transfer_params", "ec\\u005ftransfer_params"]
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        rest = b'{"model":"m","messages":["%b"],"token_ids":[1]' % (b"x" * size)
        for path, name in itertools.product(paths, names):
            body = rest + b',"%b":{"host":"evil"}}' % name.encode()
            assert (await ask(rig, request(body, target=path))).status == 200, (path, name)
            assert engine.calls.pop().body == rest + b"}", (path, name)


PLACES = [
    "{%s}",
    '{"model":"m",%s,"a":1}',
    '{"vllm_xargs":{%s}}',
    '{"extra_args":{%s}}',
    '{"extra_body":{"vllm_xargs":{%s}}}',
    '{"sampling_params":{"extra_args":{%s}}}',
    '{"sampling_params":[{"n":1},{%s}]}',
]


RIGHTS = Rules(names=True)


def _spelled(name: str) -> str:
    return name[0] + f"\\u{ord(name[1]):04x}" + name[2:]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted(REMOVED))
def test_no_place_and_spelling_leaves_a_field_that_steers_an_engine(name: str, place: str) -> None:
    for spelled in (name, _spelled(name)):
        body = (place % f'"{spelled}":["x"]').encode()
        left = json.loads(_screened(body))
        assert name not in json.dumps(left), body
        trusted = at_once(screen(body, Rules(transfer=False)))
        assert trusted.body == body


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_of_others_objects_are_refused_in_every_place(name: str, place: str) -> None:
    for spelled in (name, _spelled(name)):
        for value in ('"x"', "{}", '[null,"x"]', "0", "nullable", '""'):
            body = (place % f'"{spelled}":{value}').encode()
            with pytest.raises(ApiError) as refused:
                at_once(screen(body, RIGHTS))
            assert (refused.value.status, refused.value.code) == (400, "field_not_accepted")
            assert (refused.value.param, REFUSED[name] in refused.value.message) == (name, True)
        nothing = (place % f'"{spelled}":null').encode()
        assert at_once(screen(nothing, RIGHTS)).body == nothing
        assert _screened(body) == body


@pytest.mark.parametrize("place", PLACES)
def test_an_adapter_is_named_by_those_who_may_use_it(place: str) -> None:
    values = ['"mine"', '["mine",null]', "[]", "null"]
    for value, spelled in itertools.product(values, ("lora_path", _spelled("lora_path"))):
        body = (place % f'"{spelled}":{value}').encode()
        assert at_once(screen(body, RIGHTS, "mine".__eq__)).body == body
    for value in ('"secret"', '["mine","secret"]', '"mine "', '"\\u0073ecret"'):
        body = (place % f'"lora_path":{value}').encode()
        with pytest.raises(ApiError) as refused:
            at_once(screen(body, RIGHTS, "mine".__eq__))
        assert (refused.value.status, refused.value.code) == (403, "model_not_allowed")
        assert at_once(screen(body, Rules())).body == body
    for value in ("7", "{}", '[["secret"]]', '"\xff"', '["mine",' + '"mine",' * 20_000 + '"mine"]'):
        with pytest.raises(ApiError) as refused:
            at_once(screen((place % f'"lora_path":{value}').encode("latin-1"), RIGHTS, "mine".__eq__))
        assert refused.value.code == "field_not_accepted"


@pytest.mark.parametrize("rules", [Rules(), Rules(transfer=False), RIGHTS])
def test_a_member_is_taken_out_on_demand(rules: Rules) -> None:
    body = b'{"request_id":"a","input":{"request_id":"b"},"request\\u005fid":"c"}'
    left = at_once(screen(body, rules, also=frozenset({b"request_id"}))).body
    assert left == b'{"input":{"request_id":"b"}}'
    with pytest.raises(ApiError):
        at_once(screen(body.decode().encode("utf-16"), rules, also=frozenset({b"request_id"})))
    with pytest.raises(ApiError):
        at_once(screen(body[:-1], rules, also=frozenset({b"request_id"})))


def test_a_salt_stays_where_engines_read_it_only() -> None:
    body = b'{"cache_salt":"a","vllm_xargs":{"cache_salt":"b","x":1}}'
    assert _screened(body) == b'{"cache_salt":"a","vllm_xargs":{"x":1}}'


@pytest.mark.parametrize("size", [0, 5 << 20], ids=["small", "above 4 MiB"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/inference/v1/generate"]
)
async def test_no_size_and_path_lets_guarded_fields_through(path: str, size: int) -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        rest = b'{"model":"m","messages":["%b"]' % (b"x" * size)
        steering = b"".join(b',"%b":1' % name.encode() for name in sorted(REMOVED))
        assert (await ask(rig, request(rest + steering + b"}", target=path))).status == 200
        assert engine.calls.pop().body == rest + b"}"


@pytest.mark.parametrize("size", [0, 5 << 20], ids=["small", "above 4 MiB"])
@pytest.mark.parametrize("within", ["vllm_xargs", "sampling_params", "extra_args"])
async def test_a_refused_report_mode_is_refused_in_any_size_and_place(within: str, size: int) -> None:
    strict = ProxySettings(kv_cache_report_mode="refuse")
    body = b'{"model":"m","messages":["%b"],"%b":{"kv_cache_report_mode":"full"}}' % (
        b"x" * size,
        within.encode(),
    )
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=strict) as rig:
        for path in ("/v1/chat/completions", "/inference/v1/generate", "/v1/embeddings"):
            got = await ask(rig, request(body, target=path))
            assert got.json()["error"]["code"] == "kv_cache_report_mode_refused", path
        assert not engine.calls


async def test_trusted_clients_may_say_it() -> None:
    trusting = ProxySettings(trust_client_kv_transfer_params=True)
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=trusting) as rig:
        body = b'{"model":"m", "kv_transfer_params":{}}'
        await ask(rig, request(body))
        assert engine.calls[0].body == body


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
async def test_fields_that_cannot_be_cut_in_their_encoding_are_refused(encoding: str) -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        for path in ("/v1/completions", "/v1/responses"):
            body = '{"model":"m","kv_transfer_params":{}}'.encode(encoding)
            got = await ask(rig, request(body, target=path))
            assert (got.status, got.json()["error"]["code"]) == (400, "invalid_json")
            harmless = '{"model":"m"}'.encode(encoding)
            assert (await ask(rig, request(harmless, target=path))).status == 200
            assert engine.calls.pop().body == harmless
        assert not engine.calls


ASKS = b'{"model":"m","vllm_xargs":{"kv_cache_report_mode":"full"}%b}'


@pytest.mark.parametrize(
    "body",
    [
        ASKS % b"",
        ASKS % (b',"deep":' + b"[" * 3000 + b"]" * 3000),
        b'{"deep":' + b"[" * 3000 + b"]" * 3000 + b"," + (ASKS % b"")[1:],
    ],
    ids=["plain", "deep behind", "deep before"],
)
@pytest.mark.parametrize("fields", [(), ("content-type: text/plain",)], ids=["one type", "two types"])
async def test_refusing_the_report_mode_cannot_be_got_around(body: bytes, fields: tuple[str, ...]) -> None:
    strict = ProxySettings(kv_cache_report_mode="refuse")
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=strict) as rig:
        for path in ("/v1/chat/completions", "/v1/responses"):
            raw = request(body, target=path)
            head, _, rest = raw.partition(b"\r\n\r\n")
            for field in fields:
                head += b"\r\n" + field.encode()
            assert (await ask(rig, head + b"\r\n\r\n" + rest)).status == 400
        assert not engine.calls


@pytest.mark.parametrize("mode", ["strip", "refuse"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs":{"\xff\\u0000":1,"kv_cache_report_mode":"full"}}',
        b'{"vllm_xargs":{"kv_cache_report_mode":"full"},"\xff\\n":1}',
    ],
)
async def test_keys_that_are_no_text_are_the_clients_fault(mode: Any, body: bytes) -> None:
    settings = ProxySettings(kv_cache_report_mode=mode)
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=settings) as rig:
        got = await ask(rig, request(body))
        assert got.status == 400
        assert not engine.calls


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["kv_transfer_params", "vllm_xargs", "model", 'a"\\', "é"])
members = st.lists(st.tuples(KEYS, values | st.dictionaries(KEYS, values)), max_size=6)


@given(members, st.booleans(), st.sampled_from(["", " ", "\n\t"]))
def test_it_is_deletion_whatever_surrounds_it(
    body: list[tuple[str, Any]], ascii_only: bool, space: str
) -> None:
    def text(pairs: list[tuple[str, Any]]) -> bytes:
        said = [
            json.dumps(key, ensure_ascii=ascii_only)
            + space
            + ":"
            + json.dumps(value, ensure_ascii=ascii_only)
            for key, value in pairs
        ]
        return ("{" + f",{space}".join(said) + "}").encode()

    def without(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: inner for key, inner in value.items() if key != "kv_transfer_params"}

    kept = [
        (key, without(value) if key == "vllm_xargs" else value)
        for key, value in body
        if key != "kv_transfer_params"
    ]
    assert repr(json.loads(_screened(text(body)))) == repr(json.loads(text(kept)))
    look = peek(text(body))
    assert look.guarded == any(key in ("kv_transfer_params", "vllm_xargs") for key, _ in body)


PAD = 5 * 1024 * 1024
HUGE = {
    "image": b'"%b"' % (b"A" * PAD),
    "escapes": b'"%b"' % (b"\\n" * (PAD // 2)),
    "token ids": b"[%b1]" % (b"12345," * (PAD // 6)),
    "objects": b"[%b1]" % (b'{"a":""},' * 100_000 + b'"' + b"x" * PAD + b'"' + b","),
}


@pytest.mark.parametrize("kind", HUGE)
async def test_large_bodies_are_looked_at_in_steps(kind: str) -> None:
    body = b'{"x":%b,"kv_transfer_params":{},"model":"m","stream":true}' % HUGE[kind]
    turns, stop = 0, False

    async def others() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    found = await run_cooperatively(screen(body, Rules()))
    assert bytes(found.body) == body.replace(b'"kv_transfer_params":{},', b"")
    stop = True
    await task
    if kind != "image":  # passed over at the speed of memory
        assert turns >= 2


async def test_large_body_of_very_many_values_is_refused() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        body = b'{"model":"m","kv_transfer_params":1,"x":[%b1]}' % (b"[]," * (PAD // 3))
        for path in ("/v1/completions", "/v1/responses"):
            got = await ask(rig, request(body, target=path))
            assert (got.status, got.json()["error"]["code"]) == (413, "body_too_complex")
        assert not engine.calls


async def test_large_body_reaches_the_engine_whole() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        pad = b"A" * PAD
        for key in (b"kv_transfer_params", b"kv\\u005ftransfer_params"):
            body = b'{"model":"m","x":"%b","%b":{}}' % (pad, key)
            assert (await ask(rig, request(body))).status == 200
            assert engine.calls.pop().body == b'{"model":"m","x":"%b"}' % pad
        assert rig.planner.requests[0].model == "m"


async def test_get_on_a_post_path_is_not_allowed() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize"):
            got = await ask(rig, request(b"", method="GET", target=path))
            assert (got.status, got.json()["error"]["code"]) == (405, "method_not_allowed")
            assert got.head["allow"] == "POST"
        assert not engine.calls


async def test_compressed_body_is_refused_by_name() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"\x1f\x8b", "content-encoding: gzip"))
        assert (got.status, got.json()["error"]["code"]) == (415, "unsupported_content_encoding")
        assert "gzip" in got.json()["error"]["message"]
        assert (await ask(rig, request(b'{"model":"m"}', "content-encoding: identity"))).status == 200
        assert len(engine.calls) == 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"messages":[{"content":[{"type":"image_url","uuid":"a"}]}]}', True),
        (b'{"messages":[{"content":[{"\\u0075u\\u0069d":"a","image_url":null}]}]}', True),
        (b'{"messages":[{"content":[{"type":"image\\u005furl","uuid":1}]}]}', True),
        (b'{"a":[[[{"b":{"audio_url":{"url":"x"},"uuid":"a"}}]]]}', True),
        (b'{"a":"' + b"x" * ((1 << 20) - 12) + b'","c":[{"uuid":"a","video_url":1}]}', True),
        (b'{"features":{"mm\\u005Fhashes":{"image":["a"]}}}', True),
        (b'{"features":null,"messages":[{"content":[{"type":"image_url","uuid":null}]}]}', False),
        (b'{"messages":[{"content":"say {\\"type\\":\\"image_url\\",\\"uuid\\":\\"a\\"}"}]}', False),
        (b'{"tools":[{"function":{"parameters":{"properties":{"uuid":{"type":"string"}}}}}]}', False),
        (b'{"format":"uuid","messages":[{"content":[{"type":"image_url","image_url":{}}]}]}', False),
        (b'{"content":[{"type":"tool_use","input":{"uuid":"a"}},{"type":"image"}]}', False),
        (b'["uuid",{"image_url":1}]', False),
        (b'{"uuid":"a","image_url":', False),
    ],
)
def test_names_that_a_client_gives_to_media_are_found(body: bytes, named: bool) -> None:
    assert at_once(names_media(body)) is named


_VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.sampled_from(["uuid", "image_url", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["uuid", "image_url", "type", "mm_hashes", "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def _has_named_media(value: Any) -> bool:
    """The rule, over decoded values."""
    if isinstance(value, list):
        return any(map(_has_named_media, value))
    if not isinstance(value, dict):
        return False
    media = "image_url" in value or value.get("type") == "image_url"
    own = value.get("mm_hashes") is not None or (value.get("uuid") is not None and media)
    return own or any(map(_has_named_media, value.values()))


@given(st.dictionaries(st.sampled_from(["messages", "uuid", "image_url"]), _VALUES))
def test_names_of_media_are_found_at_any_depth(body: dict[str, Any]) -> None:
    assert at_once(names_media(json.dumps(body).encode())) is _has_named_media(body)
