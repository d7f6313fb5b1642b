"""What the two engines are told: all that depends on the connector that carries the blocks.

NIXL in pull mode: the prefill engine is asked to keep the blocks, and says in its answer where they are; the
decode engine is given that text as it is. Parameters that lack a part end a vLLM 0.32 server (an assertion in
its scheduler), so what is not whole is not handed over.

Mooncake: both engines are told a name for the transfer, and the decode engine also which engine to ask for
it, and where that can be found: by the bootstrap server in the prefill engine's pod. The prefill engine's
answer says nothing of it. It keeps blocks only of an answer that its length ended; a decode engine that asks
for others waits for minutes (``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``). A decode engine may be told before the
blocks are there, and waits for them.

OffloadingConnector's ``p2p`` tier: both engines are told a name, the decode engine also where the other one's
side channel is. Blocks that nobody fetches are dropped after 60 s; who comes later is refused at once.

Which of the first two an engine has, its answer shows: to one that has Mooncake the fields of NIXL mean the
same, and NIXL does not look at the transfer's name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from router.pd.settings import PdSettings

Told = bytes | Literal["no connector", "unreadable", "stopped", "ranks"]
"""The parameters for the decode engine, or why there are none: the engine holds nothing for anybody; it is
not known what it holds; its answer ended otherwise than by its length; it has several ranks, and was asked
without saying which."""
Problem = Literal["", "unreadable", "stopped"]
Query = Callable[[str], Awaitable[bytes]]
"""A page of the server at ``http://HOST:PORT``: what a bootstrap server answers to ``GET /query``. Raises
``OSError``."""


class PrefillHolder(msgspec.Struct, frozen=True, gc=False):
    """A prefill engine that was asked; ``rank`` as it was told, "" where it was told none."""

    base_url: str
    rank: str = ""


class Connector(Protocol):
    """One way by which blocks get from one engine to another."""

    def asks(self, transfer_id: str) -> bytes:
        """``kv_transfer_params`` of the request to the prefill engine."""

    async def told(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> Told:
        """What its answer of success hands over. ``cached_tokens``: of the prompt, were in its cache."""

    def leased(self, source: PrefillHolder) -> bool:
        """Whether a decode engine that comes after the lease is not refused, but reads what lies there."""

    async def ahead(self, transfer_id: str, source: PrefillHolder) -> bytes | None:
        """What a decode engine can be told before there is an answer; None: nothing."""

    def problem(self, answer: bytes) -> Problem:
        """Why an engine holds nothing after this answer, of which a decode engine was told ``ahead``; "": it
        does."""


class _AfterTheAnswer:
    """Of engines that say where the blocks are, or refuse who comes before them."""

    def leased(self, source: PrefillHolder) -> bool:
        """Implement ``Connector``."""
        return False

    async def ahead(self, transfer_id: str, source: PrefillHolder) -> bytes | None:
        """Implement ``Connector``."""
        return None

    def problem(self, answer: bytes) -> Problem:
        """Implement ``Connector``."""
        return ""


_ENGINES_MAX = 4096
"""Engines of which is remembered that they have Mooncake; others are asked one after the other."""
_NULL = msgspec.Raw(b"null")


_Given = str | int


class _Params(msgspec.Struct, gc=False):
    """What a decode engine must be told; nothing of it may be missing or null."""

    do_remote_prefill: bool
    remote_block_ids: list[msgspec.Raw]
    remote_engine_id: _Given
    remote_request_id: _Given
    remote_host: _Given
    remote_port: _Given
    tp_size: _Given


class _Choice(msgspec.Struct, gc=False):
    finish_reason: Any = None


class _Answer(msgspec.Struct, gc=False):
    kv_transfer_params: msgspec.Raw = _NULL


class _Ending(msgspec.Struct, gc=False):
    """What ended an answer: in ``choices``, in ``stop_reason`` (messages) or in ``status`` (responses)."""

    choices: list[_Choice] = []
    stop_reason: Any = None
    status: Any = None

    @property
    def cut_short(self) -> bool:
        """Its length ended it."""
        reasons = [choice.finish_reason for choice in self.choices]
        return reasons == ["length"] or self.stop_reason == "max_tokens" or self.status == "incomplete"


class _Entry(msgspec.Struct, gc=False):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


_ANSWER = msgspec.json.Decoder(_Answer)
_ENDING = msgspec.json.Decoder(_Ending)
_PARAMS = msgspec.json.Decoder(_Params)
_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_ASKED = (
    '"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    '"remote_block_ids":null,"remote_host":null,"remote_port":null'
)
_BLOCKS = b'"remote_block_ids":'
_EXPIRED = re.compile(rb"^vllm:nixl_num_kv_expired_reqs_total(?:\{[^\n]*\})? ([0-9.e+]+)", re.MULTILINE)
_ENGINE_METRIC = b"vllm:num_requests_running"


def expired_leases(page: bytes) -> float | None:
    """How many leases an engine with NIXL has let end, by its metrics, where they begin with the first one;
    None: it does not say."""
    return sum(map(float, _EXPIRED.findall(page))) if _ENGINE_METRIC in page else None


def without_blocks(text: bytes) -> bytes:
    """An engine's answer, or the parameters in it, with an empty list of blocks: most of the text are their
    numbers, which cost more to pass over than all the rest. As it is where they are not lists in a list."""
    key = text.find(_BLOCKS)
    start = key + len(_BLOCKS)
    start += text.startswith(b" ", start)
    if key < 0 or not text.startswith(b"[[", start):
        return text
    end = text.find(b"]]", start) + 1
    return text[: start + 1] + text[end:] if end else text


def connector_of(settings: PdSettings, query: Query) -> Connector:
    """The one that the configuration names, or the one that finds out."""
    mooncake = Mooncake(query, settings.mooncake_bootstrap_port)
    if settings.connector == "nixl":
        return NixlPull()
    if settings.connector == "offloading":
        return Offloading(settings.offloading_port)
    return mooncake if settings.connector == "mooncake" else Learned(NixlPull(), mooncake)


class NixlPull(_AfterTheAnswer):
    """NixlConnector (NixlPullConnector) of vLLM 0.30 to 0.33."""

    def asks(self, transfer_id: str) -> bytes:
        """Implement ``Connector``."""
        return b"{%b}" % _ASKED.encode()

    async def told(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> Told:
        """Implement ``Connector``. The parameters have ``cached_tokens`` already, from vLLM 0.31 on."""
        return self.read(answer)

    def leased(self, source: PrefillHolder) -> bool:
        """Implement ``Connector``."""
        return True

    def read(self, answer: bytes) -> Told:
        """What the prefill engine's answer hands over."""
        try:
            params = bytes(_ANSWER.decode(answer).kv_transfer_params)
            if params == b"null":
                return "no connector"
            held = _PARAMS.decode(without_blocks(params)).do_remote_prefill
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "unreadable"
        return params if held else "unreadable"


class Mooncake:
    """MooncakeConnector of vLLM 0.30 to 0.33, whose bootstrap servers listen on ``port``."""

    def __init__(self, query: Query, port: int) -> None:
        self._query = query
        self._port = port

    def asks(self, transfer_id: str) -> bytes:
        """Implement ``Connector``."""
        return f'{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer_id}"}}'.encode()

    async def told(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> Told:
        """Implement ``Connector``."""
        found = await self._find(transfer_id, source, cached_tokens)
        return found if found in ("no connector", "unreadable") else self.problem(answer) or found

    def leased(self, source: PrefillHolder) -> bool:
        """Implement ``Connector``: the prefill engine sends what it knows to be there."""
        return False

    async def ahead(self, transfer_id: str, source: PrefillHolder) -> bytes | None:
        """Implement ``Connector``."""
        found = await self._find(transfer_id, source)
        return found if isinstance(found, bytes) else None

    def problem(self, answer: bytes) -> Problem:
        """Implement ``Connector``."""
        try:
            return "" if _ENDING.decode(answer).cut_short else "stopped"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "unreadable"

    async def _find(self, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None) -> Told:
        """The engine is looked up each time: one that was started anew has another id. From vLLM 0.31 on a
        decode engine reports ``remote_prefill_cached_tokens`` instead of the whole prompt
        (v1/engine/output_processor.py)."""
        host = urlsplit(source.base_url).hostname or ""
        bootstrap = f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"
        try:
            entries = _ENTRIES.decode(await self._query(bootstrap))
        except OSError:
            return "no connector"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "unreadable"
        if not source.rank and len(entries) > 1:
            return "ranks"
        entry = entries.get(source.rank) if source.rank else next(iter(entries.values()), None)
        if entry is None or not entry.worker_addr:
            return "no connector"
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": entry.engine_id,
            "remote_bootstrap_addr": bootstrap,
        }
        if cached_tokens is not None:
            params["remote_prefill_cached_tokens"] = cached_tokens
        return msgspec.json.encode(params)


class Offloading(_AfterTheAnswer):
    """OffloadingConnector with a ``p2p`` tier of vLLM 0.32 and 0.33, that of rank 0 on ``port``."""

    def __init__(self, port: int) -> None:
        self._port = port

    def asks(self, transfer_id: str) -> bytes:
        """Implement ``Connector``."""
        return f'{{"remote_decoder":{{"kv_request_id":"{transfer_id}"}}}}'.encode()

    async def told(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> Told:
        """Implement ``Connector``. The answer says nothing; engines look for ``cached_tokens`` only beside
        ``do_remote_prefill``, which other connectors beside this one would take for theirs."""
        port = self._port + int(source.rank or 0)
        named = {
            "kv_request_id": transfer_id,
            "remote_host": urlsplit(source.base_url).hostname,
            "remote_port": port,
        }
        return msgspec.json.encode({"remote_prefiller": named})


class Learned:
    """Asks in a way that both understand, and goes by what the answer says."""

    def __init__(self, nixl: NixlPull, mooncake: Mooncake) -> None:
        self._nixl = nixl
        self._mooncake = mooncake
        self._have_mooncake: set[str] = set()

    def asks(self, transfer_id: str) -> bytes:
        """Implement ``Connector``."""
        return f'{{{_ASKED},"transfer_id":"{transfer_id}"}}'.encode()

    async def told(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> Told:
        """Implement ``Connector``."""
        told = self._nixl.read(answer)
        self._have_mooncake.discard(source.base_url)
        if told != "no connector":
            return told
        told = await self._mooncake.told(answer, transfer_id, source, cached_tokens)
        if isinstance(told, bytes) and len(self._have_mooncake) < _ENGINES_MAX:
            self._have_mooncake.add(source.base_url)
        return told

    async def ahead(self, transfer_id: str, source: PrefillHolder) -> bytes | None:
        """Implement ``Connector``; None where the engine has not shown yet that it has Mooncake."""
        known = source.base_url in self._have_mooncake
        return await self._mooncake.ahead(transfer_id, source) if known else None

    def leased(self, source: PrefillHolder) -> bool:
        """Implement ``Connector``."""
        return source.base_url not in self._have_mooncake

    def problem(self, answer: bytes) -> Problem:
        """Implement ``Connector``."""
        return self._mooncake.problem(answer)
