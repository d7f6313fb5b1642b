"""Removes or refuses fields of client bodies that only the router may send
(``kvatlas.router.openai.guarded``).

Wrong ``kv_transfer_params`` end vLLM's engine process, ``lora_path`` reaches an adapter that the client's key
may not use, ranks and hints overrule the placement.
``kv_cache_report_mode`` makes an engine report blocks again that it holds already, which spoils every index
that counts copies; the operator may have it taken out or refused.
Members are cut out of the text with their comma, as often as they occur and however their keys are escaped;
every other byte stays. A body that cannot be cut with certainty but may hold one of them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

import msgspec

from kvatlas.router.openai.errors import ApiError, bad_request, echoed, model_not_allowed
from kvatlas.router.openai.forms import Form
from kvatlas.router.openai.guarded import ADAPTERS, CONTAINERS, REFUSED, REMOVED
from kvatlas.router.openai.members import BodyMember, MalformedError, Scan, has_any, joined
from kvatlas.router.proxy.settings import ReportMode

_REMOVED = frozenset(name.encode() for name in REMOVED)
_REFUSED = {name.encode(): remedy for name, remedy in REFUSED.items()}
_ADAPTERS = frozenset(name.encode() for name in ADAPTERS)
_CONTAINERS = frozenset(name.encode() for name in CONTAINERS)
_REPORT_MODE, _SALT = b"kv_cache_report_mode", b"cache_salt"
# A text without any of these has none of our keys, in any spelling.
_HINTS = (*(b'"%b"' % name for name in (*_REMOVED, *_REFUSED, *_ADAPTERS, _REPORT_MODE)), b"\\u")
_TRANSCODED_BYTES_MAX = 1 << 20
_ADAPTERS_BYTES_MAX = 64 * 1024
_ADAPTER_NAMES = msgspec.json.Decoder(str | list[str | None])


class Rules(msgspec.Struct, frozen=True):
    """Fields kept away: ``transfer`` takes ``REMOVED`` out. ``names``, where clients have rights of their
    own, refuses ``REFUSED``, and ``ADAPTERS`` that name a model for which ``may_use`` is not true."""

    transfer: bool = True
    report_mode: ReportMode = "pass"
    names: bool = False

    @property
    def idle(self) -> bool:
        """Nothing is kept away."""
        return not self.transfer and not self.names and self.report_mode == "pass"


MayUse = Callable[[str], bool]


def _none(model: str) -> bool:
    """No model may be used."""
    return False


class Screened(msgspec.Struct):
    """The body to be forwarded, and what was taken out of it."""

    body: bytes
    transfer: int = 0
    report_mode: int = 0
    taken: int = 0


def may_be_object(body: bytes) -> bool:
    """Whether an engine could read a JSON object from this body, whatever its content type says."""
    start = bytes(body[:64])
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    return bool(start) and (text[:1] in (b"{", b"") or not _is_utf8(start))


def screen(
    body: bytes, rules: Rules, may_use: MayUse = _none, also: frozenset[bytes] = frozenset()
) -> Generator[None, None, Screened]:
    """Steps to the body that may be forwarded, for ``run_cooperatively``; members of the body itself named in
    ``also`` are taken out too. Raises ``ApiError`` 400, and 403 for an adapter."""
    if rules.idle and not also:
        return Screened(body)
    if not _is_utf8(bytes(body[:4])):
        text = _transcoded(body)
        found = yield from _screened(text, rules, may_use, also)
        if found.transfer or found.report_mode or found.taken:
            raise bad_request("invalid_json", "Send the request body in UTF-8.")
        return Screened(body)
    return (yield from _screened(body, rules, may_use, also))


def screen_form(form: Form, rules: Rules) -> Generator[None, None, None]:
    """Steps to certainty that a form has nothing that must not reach engines: vLLM reads ``vllm_xargs`` of
    transcriptions and translations as a JSON text. Raises ``ApiError`` 400."""
    if rules.idle:
        return
    for field in form.fields:
        name = field.name.strip().lower()
        if (rules.transfer and name in REMOVED) or (rules.names and name in REFUSED.keys() | ADAPTERS):
            raise _field_refused(field.name)
        outer = next((outer for outer in CONTAINERS if name.startswith(outer)), None)
        if outer is None:
            continue
        value = form.value(outer)  # refuses any other spelling
        if value is None:
            raise _field_refused(field.name)
        found = yield from _screened(
            b'{"%b":%b}' % (outer.encode(), value.encode()), rules, _none, frozenset()
        )
        if found.transfer or found.report_mode:
            raise _field_refused(field.name)


def _name_refused(name: str, remedy: str) -> ApiError:
    return bad_request(
        "field_not_accepted",
        f"{name} is not accepted by this router, since it may name what belongs to another client: {remedy}.",
        param=name,
    )


def _field_refused(name: str) -> ApiError:
    return bad_request(
        "form_field_refused",
        f"The form's field {echoed(name)} has what only this router may send to engines (transfers, "
        "adapters, ranks, hints, or a report mode); remove it.",
        param=name[:64],
    )


def _screened(
    body: bytes, rules: Rules, may_use: MayUse, also: frozenset[bytes]
) -> Generator[None, None, Screened]:
    cutter = _Cutter(body, rules, may_use, also)
    try:
        yield from cutter.run()
    except MalformedError:
        hints = (*_HINTS, *(b'"%b"' % name for name in also))
        if (yield from has_any(body, hints)):
            raise bad_request("invalid_json", "The request body is not a JSON object.") from None
        return Screened(body)
    if not cutter.cuts:
        return Screened(body)
    view, pieces, done = memoryview(body), [], 0
    for start, end in cutter.cuts:
        pieces.append(view[done:start])
        done = end
    left = yield from joined((*pieces, view[done:]))
    return Screened(left, cutter.transfer, cutter.report_mode, cutter.taken)


class _Cutter:
    """Finds what is to be cut out of one body."""

    def __init__(self, body: bytes, rules: Rules, may_use: MayUse, also: frozenset[bytes]) -> None:
        self._scan = Scan(body)
        self._rules = rules
        self._may_use = may_use
        self._also = also
        self.cuts: list[tuple[int, int]] = []
        self.transfer = self.report_mode = self.taken = 0

    def run(self) -> Generator[None, None, None]:
        start = self._scan.start()
        if start is not None:
            yield from self._object(start, top=True)

    def _object(self, at: int, *, top: bool) -> Generator[None, None, None]:
        """Adds the cuts of this object, in order; ``top``: it is the body."""
        kept_end = -1  # of the last member that stays
        cut_from = -1  # of the members that go since then
        last_end = at + 1
        for member in self._scan.members(at):
            if member is None:
                yield
                continue
            if self._goes(member, top=top):
                cut_from = member.start if cut_from < 0 else cut_from
            else:
                if cut_from >= 0:
                    self.cuts.append((cut_from, member.start))
                cut_from, kept_end = -1, member.end
                if member.name in _CONTAINERS:
                    yield from self._within(member)
            last_end = member.end
        if cut_from >= 0:
            self.cuts.append((kept_end if kept_end >= 0 else cut_from, last_end))

    def _goes(self, member: BodyMember, *, top: bool) -> bool:
        name, rules = member.name, self._rules
        if top and name in self._also:
            self.taken += 1
            return True
        # A salt of the body itself is seen to where caches are isolated.
        if name in _REMOVED or (name == _SALT and not top):
            self.transfer += rules.transfer
            return rules.transfer
        if rules.names and (name in _REFUSED or name in _ADAPTERS) and self._text(member) != b"null":
            if name in _REFUSED:
                raise _name_refused(name.decode(), _REFUSED[name])
            self._check_adapters(member)
        if name == _REPORT_MODE and not top and rules.report_mode != "pass":
            if rules.report_mode == "refuse":
                raise _refused()
            self.report_mode += 1
            return True
        return False

    def _check_adapters(self, member: BodyMember) -> None:
        try:
            value = self._scan.text[member.value : min(member.end, member.value + _ADAPTERS_BYTES_MAX)]
            named = _ADAPTER_NAMES.decode(bytes(value))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise _name_refused(member.name.decode(), "send one name of an adapter") from None
        for adapter in [named] if isinstance(named, str) else named:
            if adapter is not None and not self._may_use(adapter):
                raise model_not_allowed(adapter)

    def _text(self, member: BodyMember) -> bytes:
        return bytes(self._scan.text[member.value : min(member.end, member.value + 5)])

    def _within(self, member: BodyMember) -> Generator[None, None, None]:
        first = self._scan.text[member.value : member.value + 1]
        if first == b"{":
            yield from self._object(member.value, top=False)
        elif first == b"[":
            # SGLang takes a list of ``sampling_params``, one for each prompt.
            for item in self._scan.items(member.value):
                if item is None:
                    yield
                elif self._scan.text[item.value : item.value + 1] == b"{":
                    yield from self._object(item.value, top=False)
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
    field = f"vllm_xargs.{_REPORT_MODE.decode()}"
    return bad_request(
        "kv_cache_report_mode_refused", f"{field} is not accepted by this router; remove it.", param=field
    )
