"""Forms are read as every parser reads them, or refused: whatever clients write, whatever attackers do."""

from __future__ import annotations

import contextlib
import email.parser
import email.policy
import re
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlencode

import aiohttp
import pytest
import requests
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam, MultipartReader
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.forms import FIELDS_MAX, Form, form_type, read_form
from kvatlas.router.openai.members import at_once
from tests.support.examples import examples
from tests.support.waiting import run

KIND = b"multipart/form-data; boundary=x7"
URLENCODED = b"application/x-www-form-urlencoded"
PLAIN = (
    b'--x7\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--x7\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\r\n\r\n--x\r\n--x7--\r\n"
)


def read(body: bytes, kind: bytes = KIND) -> Form:
    return at_once(read_form(kind, body))


def refused(body: bytes, kind: bytes = KIND) -> bool:
    try:
        read(body, kind).look()
    except ApiError as error:
        return error.code == "invalid_form"
    return False


FIELDS = {"model": "gr\u00f6\u00dfe/m-1", "stream": "true", "prompt": "a\r\nb & c=d; +%"}


def by_requests() -> tuple[bytes, bytes]:
    files = {"file": ('a "1".wav', b"\0\r\n--\r\n" * 50, "audio/wav")}
    made = requests.Request("POST", "http://h/", data=FIELDS, files=files).prepare()
    assert isinstance(made.body, bytes)
    return made.headers["content-type"].encode(), made.body


def by_aiohttp() -> tuple[bytes, bytes]:
    async def main() -> tuple[bytes, bytes]:
        form = aiohttp.FormData()
        for name, value in FIELDS.items():
            form.add_field(name, value)
        form.add_field("file", b"\0\r\n" * 50, filename="\u00e9.wav", content_type="audio/wav")
        payload: Any = form()

        class Writer:
            data = b""

            async def write(self, piece: bytes) -> None:
                self.data += piece

        writer: Any = Writer()
        await payload.write(writer)
        return payload.headers["content-type"].encode(), writer.data

    return run(main())


def by_httpx() -> tuple[bytes, bytes]:
    """By the client library under ``openai``."""
    import openai  # noqa: PLC0415  # slow

    client = openai.OpenAI(api_key="x", base_url="http://h/")
    made = client._client.build_request(
        "POST", "http://h/", data=FIELDS, files={"file": ("a.wav", b"\0" * 50, "audio/wav")}
    )
    return made.headers["content-type"].encode(), made.read()


CURL = (
    b"multipart/form-data; boundary=------------------------d74496d66958873e",
    (
        b"--------------------------d74496d66958873e\r\n"
        b'Content-Disposition: form-data; name="model"\r\n\r\ngr\xc3\xb6\xc3\x9fe/m-1\r\n'
        b"--------------------------d74496d66958873e\r\n"
        b'Content-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
        b"--------------------------d74496d66958873e\r\n"
        b'Content-Disposition: form-data; name="file"; filename="a\\"b.wav"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n\0\0\r\n"
        b"--------------------------d74496d66958873e--\r\n"
    ),
)


@pytest.mark.parametrize("made", [by_requests, by_aiohttp, by_httpx, lambda: CURL])
def test_forms_of_common_clients_are_read(made: Any) -> None:
    kind, body = made()
    form = read(body, kind)
    look = form.look()
    assert (look.model, look.stream) == (FIELDS["model"], True)
    assert any(field.is_file for field in form.fields)
    changed = at_once(form.with_value("model", "other"))
    assert read(changed, kind).look().model == "other"
    assert changed.replace(b"other", FIELDS["model"].encode()) == body


def test_urlencoded_forms_are_read() -> None:
    form = read(urlencode(FIELDS).encode(), URLENCODED)
    assert [form.value(name) for name in FIELDS] == list(FIELDS.values())
    changed = at_once(form.with_value("model", "a b/c"))
    assert dict(parse_qsl(changed.decode())) == FIELDS | {"model": "a b/c"}


HEAD = b'--x7\r\nContent-Disposition: form-data; name="model"'
ODD = [
    b"\r\n" + PLAIN,
    b"preamble\r\n" + PLAIN,
    PLAIN + b"epilogue",
    PLAIN.replace(b"\r\n", b"\n"),
    PLAIN[:-8],
    b"",
    b"--x7--",
    HEAD + b"\r\n\r\nm\r\n" + PLAIN,
    HEAD + b"\r\n\r\nm\n--x7\r\n" + PLAIN[6:],
    HEAD + b"\r\n\r\nm\r\n--x7 \r\n" + PLAIN[6:],
    HEAD + b"\r\n\r\nm\r\n--x7more\r\n--x7--",
    HEAD + b"\r\n\r\n--x7--",
    HEAD + b'; name="other"\r\n\r\nm\r\n--x7--',
    HEAD + b"; name*=utf-8''other\r\n\r\nm\r\n--x7--",
    HEAD + b'; filename="a\\\\"; x="y"\r\n\r\nm\r\n--x7--',
    HEAD + b'; filename="f"\r\n\r\nm\r\n--x7--',
    HEAD + b'\r\nContent-Disposition: form-data; name="x"\r\n\r\nm\r\n--x7--',
    HEAD + b"\r\nContent-Transfer-Encoding: base64\r\n\r\nbQ==\r\n--x7--",
    HEAD + b"\r\n folded\r\n\r\nm\r\n--x7--",
    HEAD + b"\r\nX: a\rb\r\n\r\nm\r\n--x7--",
    HEAD + b"\r\n\r\n\xff\r\n--x7--",
    b'--x7\r\nContent-Disposition: form-data; name=" model"\r\n\r\nm\r\n--x7--',
    b'--x7\r\nContent-Disposition: form-data; name="Model"\r\n\r\nm\r\n--x7--',
    b'--x7\r\nContent-Disposition: form-data; name="mod\\el"\r\n\r\nm\r\n--x7--',
    b'--x7\r\nContent-Disposition: form-data; name="mod%65l"\r\n\r\nm\r\n--x7--',
    b"--x7\r\nContent-Disposition: form-data; name=:\r\n\r\nm\r\n--x7--",
    b"--x7\r\nContent-Disposition: form-data; name=mod@el\r\n\r\nm\r\n--x7--",
    b'--x7\r\nContent-Disposition: attachment; name="model"\r\n\r\nm\r\n--x7--',
    b"--x7\r\n\r\nm\r\n--x7--",
    HEAD + b"\r\nX: " + b"x" * 9000 + b"\r\n\r\nm\r\n--x7--",
    HEAD + b"\r\n\r\n" + b"m" * 70_000 + b"\r\n--x7--",
    (HEAD + b'x"\r\n\r\nm\r\n').replace(b'model"', b"y") * (FIELDS_MAX + 1) + b"--x7--",
]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_ambiguous_forms_are_refused(body: bytes) -> None:
    assert refused(body)


@pytest.mark.parametrize(
    "kind",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=x7; boundary=y",
        b'multipart/form-data; boundary="x7"; charset=utf-16',
        b"multipart/form-data; boundary=x7; charset=utf-7",
        b'multipart/form-data; boundary="x\\7"',
        b"multipart/form-data; boundary*=x7",
        b"multipart/form-data; boundary=x7, text/plain",
        b"multipart/form-data; boundary=" + b"x" * 71,
    ],
)
def test_odd_content_types_of_forms_are_refused(kind: bytes) -> None:
    assert not refused(PLAIN)
    assert not refused(HEAD + b"\r\n\r\nm\r\n--x7--"), "one field is enough"
    assert not refused(PLAIN, b'Multipart/Form-Data ; charset="UTF-8"; boundary="x7"')
    assert refused(PLAIN, kind)


@pytest.mark.parametrize(
    "body",
    [b'{"model":"m"}', b"model=a;model=b", b"model=a&model=b", b"model=a&mod%65l=b", b"model=\xff", b"a b=c"],
)
def test_odd_urlencoded_forms_are_refused(body: bytes) -> None:
    assert refused(body, URLENCODED)


def test_a_value_is_escaped_where_the_form_is_urlencoded_alone() -> None:
    for body, kind, written in ((PLAIN, KIND, b"a b/c%"), (b"model=m", URLENCODED, b"a+b%2Fc%25")):
        changed = at_once(read(body, kind).with_value("model", "a b/c%"))
        assert written in changed
        assert read(changed, kind).look().model == "a b/c%"


def test_a_form_may_have_as_many_fields_as_are_allowed() -> None:
    names = [b"f%d=v" % number for number in range(FIELDS_MAX)]
    assert len(read(b"&".join(names), URLENCODED).fields) == FIELDS_MAX
    assert refused(b"&".join([*names, b"one=more"]), URLENCODED)


def test_a_form_is_recognised_by_its_content_type_alone() -> None:
    json, form = (b"content-type", b"application/json"), (b"content-type", KIND)
    assert form_type([json]) is None
    assert form_type([]) is None
    assert form_type([form]) == KIND
    assert form_type([form, form]) == KIND
    for both in ([form, json], [json, form]):
        with pytest.raises(ApiError):
            form_type(both)


def by_email(body: bytes) -> list[tuple[str, bytes]]:
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(
        b"Content-Type: " + KIND + b"\r\n\r\n" + body
    )
    return [
        (str(part.get_param("name", header="content-disposition")), part.get_payload(decode=True) or b"")  # type: ignore[union-attr, misc]
        for part in message.iter_parts()  # type: ignore[attr-defined]
    ]


def by_reader(body: bytes) -> list[tuple[str, bytes]]:
    """By the parser of aiohttp's server."""

    class Source:
        def __init__(self) -> None:
            self.file = BytesIO(body)

        async def readline(self, **_: Any) -> bytes:
            return self.file.readline()

        async def read(self, size: int = -1) -> bytes:
            return self.file.read(size)

        def unread_data(self, data: bytes) -> None:
            self.file.seek(-len(data), 1)

        def at_eof(self) -> bool:
            return self.file.tell() >= len(body)

    async def main() -> list[tuple[str, bytes]]:
        source: Any = Source()
        reader = MultipartReader(CIMultiDict({"Content-Type": KIND.decode()}), source)
        found = []
        while (part := await reader.next()) is not None:
            assert not isinstance(part, MultipartReader)
            found.append((str(part.name), bytes(await part.read())))
        return found

    return run(main())


PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"--x7",
    b"--x7--",
    b"--",
    b"x7",
    b"--x",
    b" ",
    b"\t",
    b"m",
    b"z",
    b":",
    b";",
    b'"',
    b"\\",
    b"Content-Disposition: form-data; name=",
    b'"model"',
    b'"a"',
    b"model",
    b'; filename="f"',
    b"X: y",
)


@pytest.mark.long
# Most forms that were damaged are refused.
@settings(max_examples=examples(250))
@given(
    st.one_of(
        st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join),
        st.tuples(
            st.integers(0, len(PLAIN)), st.integers(0, 12), st.lists(st.sampled_from(PIECES), max_size=3)
        ).map(lambda cut: PLAIN[: cut[0]] + b"".join(cut[2]) + PLAIN[cut[0] + cut[1] :]),
    )
)
@example(PLAIN)
def test_accepted_forms_are_read_equally_by_two_other_parsers(body: bytes) -> None:
    try:
        form = read(body)
    except ApiError:
        assume(False)
        return
    ours = [(field.name, body[field.start : field.end]) for field in form.fields]
    with contextlib.suppress(BadContentDispositionHeader, BadContentDispositionParam):  # it refuses more
        assert by_reader(body) == ours
    bare = re.compile(rb"\r(?!\n)|(?<!\r)\n")  # which that one turns into whole line ends
    if not bare.search(body):
        assert by_email(body) == ours


@pytest.mark.parametrize("boundary", [b"", b"x" * 71, b"x7 ", b"x7;", b"x*7", b"x7\xff"])
def test_a_boundary_that_parsers_read_differently_is_refused(boundary: bytes) -> None:
    """The body has it where it belongs, so that nothing else is wrong."""
    kind = b'multipart/form-data; boundary="' + boundary + b'"'
    assert refused(PLAIN.replace(b"--x7", b"--" + boundary), kind)
