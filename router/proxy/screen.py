"""Removes fields from client bodies that must not reach engines.

``kv_transfer_params`` tells an engine to fetch KV blocks from another one, ``ec_transfer_params`` the output
of an image encoder; a made-up one ends vLLM's engine process. vLLM reads them at the top of the body, within
``vllm_xargs``, and within ``extra_args`` of ``sampling_params`` (``/inference/v1/generate``); they are taken
out of all unless clients are trusted.
``kv_cache_report_mode`` within them makes an engine report blocks again that it holds already, which spoils
every index that counts copies; the operator may have it taken out or refused.
Members are cut out of the text with their comma, as often as they occur and however their keys are escaped;
every other byte stays. A body that cannot be cut with certainty but may hold one of them is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

import msgspec

from router.openai.errors import ApiError, bad_request, echoed
from router.openai.forms import Form
from router.openai.members import BodyMember, MalformedError, Scan, has_any, joined
from router.prompts.chat.messages import MEDIA_KEYS
from router.proxy.settings import ReportMode

_TRANSFERS, _XARGS = frozenset({b"kv_transfer_params", b"ec_transfer_params"}), b"vllm_xargs"
_REPORT_MODE = b"kv_cache_report_mode"
_SAMPLING, _EXTRA = b"sampling_params", b"extra_args"
# A text without any of these has none of our keys, in any spelling.
_HINTS = (b"_transfer_params", b"report_mode", b"\\u")
# A member, and what it lies within.
_LOOKED_INTO = frozenset({(b"", _XARGS), (b"", _SAMPLING), (_SAMPLING, _EXTRA)})
_TRANSCODED_BYTES_MAX = 1 << 20


def _spelled(*names: str) -> re.Pattern[bytes]:
    """A pattern of these JSON texts in any spelling of their letters."""
    letters = [[b"(?:%b|\\\\u00(?i:%02x))" % (re.escape(c.encode()), ord(c)) for c in name] for name in names]
    return re.compile(b'"(?:%b)"' % b"|".join(map(b"".join, letters)))


_UUID, _MM_HASHES = b"uuid", b"mm_hashes"
_MEDIA = frozenset(key.encode() for key in MEDIA_KEYS)
_NAME, _MEDIUM = _spelled("uuid", "mm_hashes"), _spelled("mm_hashes", *sorted(MEDIA_KEYS))
_WINDOW_BYTES, _OVERLAP_BYTES = 1 << 20, 128


class Rules(msgspec.Struct, frozen=True):
    """Fields kept away: ``transfer`` takes ``kv_transfer_params`` and ``ec_transfer_params`` out."""

    transfer: bool = True
    report_mode: ReportMode = "pass"

    @property
    def idle(self) -> bool:
        """Nothing is kept away."""
        return not self.transfer and self.report_mode == "pass"


class Screened(msgspec.Struct):
    """The body to be forwarded, and what was taken out of it."""

    body: bytes
    transfer: int = 0
    report_mode: int = 0


def may_be_object(body: bytes) -> bool:
    """Whether an engine could read a JSON object from this body, whatever its content type says."""
    start = bytes(body[:64])
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    return bool(start) and (text[:1] in (b"{", b"") or not _is_utf8(start))


def screen(body: bytes, rules: Rules) -> Generator[None, None, Screened]:
    """Steps to the body that may be forwarded, for ``run_cooperatively``. Raises ``ApiError`` 400."""
    if rules.idle:
        return Screened(body)
    if not _is_utf8(bytes(body[:4])):
        text = _transcoded(body)
        found = yield from _screened(text, rules)
        if found.transfer or found.report_mode:
            raise bad_request("invalid_json", "Send the request body in UTF-8.")
        return Screened(body)
    return (yield from _screened(body, rules))


def screen_form(form: Form, rules: Rules) -> Generator[None, None, None]:
    """Steps to certainty that a form has nothing that must not reach engines: vLLM reads ``vllm_xargs`` of
    transcriptions and translations as a JSON text. Raises ``ApiError`` 400."""
    if rules.idle:
        return
    for field in form.fields:
        name = field.name.strip().lower()
        if rules.transfer and "_transfer_params" in name:
            raise _field_refused(field.name)
        outer = next((outer for outer in (_XARGS, _SAMPLING) if name.startswith(outer.decode())), None)
        if outer is None:
            continue
        value = form.value(outer.decode())  # refuses any other spelling
        if value is None:
            raise _field_refused(field.name)
        found = yield from _screened(b'{"%b":%b}' % (outer, value.encode()), rules)
        if found.transfer or found.report_mode:
            raise _field_refused(field.name)


def names_media(body: bytes) -> Generator[None, None, bool]:
    """Steps to whether an image, audio or video in a body has a name of the client's: ``uuid`` in a part of
    a message, ``mm_hashes`` in ``features`` of ``/inference/v1/generate``. vLLM takes it for the content
    (multimodal/processing/inputs.py, ``get_mm_hashes``, 0.33): a part with no content, but the name of
    another client's image, shows the model that image. A body that cannot be read has none.
    """
    # Chats without media, whose tools often know uuids, are not gone through.
    for pattern in (_NAME, _MEDIUM):
        for at in range(0, len(body), _WINDOW_BYTES):
            if pattern.search(body, at, at + _WINDOW_BYTES + _OVERLAP_BYTES):
                break
            yield
        else:
            return False
    scan = Scan(body)
    try:
        for members in scan.objects():
            if members is None:
                yield
            elif _names_media(scan, members):
                return True
    except MalformedError:
        pass
    return False


def _names_media(scan: Scan, members: list[BodyMember]) -> bool:
    text = scan.text
    told = {one.name: one for one in members if text[one.value : one.end] != b"null"}
    if _UUID not in told or _MM_HASHES in told:
        return _MM_HASHES in told
    kind = told.get(b"type")
    is_text = kind is not None and text[kind.value : kind.value + 1] == b'"'
    # An image may be null: its name stands for it.
    return not _MEDIA.isdisjoint(one.name for one in members) or (
        kind is not None and is_text and scan.decoded(kind) in _MEDIA
    )


def _field_refused(name: str) -> ApiError:
    return bad_request(
        "form_field_refused",
        f"The form's field {echoed(name)} has transfer parameters or a report mode, which this router takes "
        "from no client; remove them.",
        param=name[:64],
    )


def _screened(body: bytes, rules: Rules) -> Generator[None, None, Screened]:
    cutter = _Cutter(body, rules)
    try:
        yield from cutter.run()
    except MalformedError:
        if (yield from has_any(body, _HINTS)):
            raise bad_request("invalid_json", "The request body is not a JSON object.") from None
        return Screened(body)
    if not cutter.cuts:
        return Screened(body)
    view, pieces, done = memoryview(body), [], 0
    for start, end in cutter.cuts:
        pieces.append(view[done:start])
        done = end
    left = yield from joined((*pieces, view[done:]))
    return Screened(left, cutter.transfer, cutter.report_mode)


class _Cutter:
    """Finds what is to be cut out of one body."""

    def __init__(self, body: bytes, rules: Rules) -> None:
        self._scan = Scan(body)
        self._rules = rules
        self.cuts: list[tuple[int, int]] = []
        self.transfer = self.report_mode = 0

    def run(self) -> Generator[None, None, None]:
        start = self._scan.start()
        if start is not None:
            yield from self._object(start, within=b"")

    def _object(self, at: int, *, within: bytes) -> Generator[None, None, None]:
        """Adds the cuts of this object, in order; ``within`` is the member it is, empty: the body."""
        kept_end = -1  # of the last member that stays
        cut_from = -1  # of the members that go since then
        last_end = at + 1
        for member in self._scan.members(at):
            if member is None:
                yield
                continue
            if self._goes(member, top=not within):
                cut_from = member.start if cut_from < 0 else cut_from
            else:
                if cut_from >= 0:
                    self.cuts.append((cut_from, member.start))
                cut_from, kept_end = -1, member.end
                if (within, member.name) in _LOOKED_INTO:
                    yield from self._within(member)
            last_end = member.end
        if cut_from >= 0:
            self.cuts.append((kept_end if kept_end >= 0 else cut_from, last_end))

    def _goes(self, member: BodyMember, *, top: bool) -> bool:
        if member.name in _TRANSFERS and self._rules.transfer:
            self.transfer += 1
            return True
        if member.name == _REPORT_MODE and not top and self._rules.report_mode != "pass":
            if self._rules.report_mode == "refuse":
                raise _refused()
            self.report_mode += 1
            return True
        return False

    def _within(self, member: BodyMember) -> Generator[None, None, None]:
        first = self._scan.text[member.value : member.value + 1]
        if first == b"{":
            yield from self._object(member.value, within=member.name)
        elif (
            # Form fields carry it as a JSON text.
            first == b'"'
            and self._rules.report_mode == "refuse"
            and _REPORT_MODE in self._scan.decoded(member)
        ):
            raise _refused()


def _is_utf8(start: bytes) -> bool:
    """By the first bytes, as Python's parser tells."""
    return json.detect_encoding(start[:4]).startswith("utf-8")


def _transcoded(body: bytes) -> bytes:
    if len(body) > _TRANSCODED_BYTES_MAX:
        raise bad_request("invalid_json", "Send the request body in UTF-8.")
    try:
        text = bytes(body).decode(json.detect_encoding(bytes(body[:4])), "surrogatepass")
    except UnicodeDecodeError:
        return b""  # no engine can read it either
    return text.encode("utf-8", "surrogatepass")


def _refused() -> ApiError:
    field = f"{_XARGS.decode()}.{_REPORT_MODE.decode()}"
    return bad_request(
        "kv_cache_report_mode_refused", f"{field} is not accepted by this router; remove it.", param=field
    )
