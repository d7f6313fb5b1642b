"""Transfer parameters of both requests, by the connector that carries the blocks.

NIXL in pull mode: the prefill engine is requested to keep the blocks, and its answer contains their location;
that text goes to the decode engine unchanged. Incomplete parameters terminate a vLLM 0.32 server (an
assertion in its scheduler), so they are never handed over.

Mooncake: both engines get a transfer id, and the decode engine also the engine to fetch from, found through
the bootstrap server in the prefill engine's pod. The prefill engine's answer does not mention it. Blocks are
kept only if the answer ended by its length; a decode engine that asks for others waits for minutes
(``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``).

OffloadingConnector's ``p2p`` tier: both engines get a transfer id, the decode engine also the address of the
other's side channel. Blocks that are not fetched are dropped after 60 s; later readers are refused at once.

The engine's connector, of the first two, is detected from its answer: Mooncake accepts NIXL's fields with the
same meaning, and NIXL ignores the transfer id.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from kvatlas.router.pd.bodies import SplitBody
from kvatlas.router.pd.settings import PdSettings

# The parameters for the decode engine, or why there are none: the engine holds no blocks; its state is
# unknown; its answer did not end by its length; it has several ranks, and the request named none.
TransferResult = bytes | Literal["no connector", "unreadable", "stopped", "ranks"]
# Get a page of the server at ``http://HOST:PORT``: a bootstrap server's answer to ``GET /query``. Raises
# ``OSError``.
Query = Callable[[str], Awaitable[bytes]]


class PrefillHolder(msgspec.Struct, frozen=True, gc=False):
    """A prefill engine that got the request; ``rank``: as sent to it, "" if none was."""

    base_url: str
    rank: str = ""


class Connector(Protocol):
    """One way to transfer blocks between engines."""

    def prefill_params(self, transfer_id: str) -> bytes:
        """``kv_transfer_params`` of the request to the prefill engine."""

    async def decode_params(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        """Parameters from its successful answer. ``cached_tokens``: prompt tokens that were in its cache."""

    def leased(self, source: PrefillHolder) -> bool:
        """Whether a decode engine that comes after the lease reads whatever the blocks hold then, instead of
        being refused."""


# Number of engines remembered as having Mooncake.
_ENGINES_MAX = 4096
_NULL = msgspec.Raw(b"null")


_Given = str | int


class _Params(msgspec.Struct, gc=False):
    """Parameters that a decode engine needs; none may be missing or null."""

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
    """End of an answer: field of ``choices``, ``stop_reason`` (messages) or ``status`` (responses)."""

    choices: list[_Choice] = []
    stop_reason: Any = None
    status: Any = None

    @property
    def cut_short(self) -> bool:
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
    """Return the number of leases that expired at an engine with NIXL, from its metrics page, if that starts
    with the first one; None if the page lacks it."""
    return sum(map(float, _EXPIRED.findall(page))) if _ENGINE_METRIC in page else None


def without_blocks(text: bytes) -> bytes:
    """Return an engine's answer, or its parameters, with an empty list of blocks: block numbers are most of
    the text, and parsing them costs more than the rest. Unchanged unless they are a list of lists."""
    key = text.find(_BLOCKS)
    start = key + len(_BLOCKS)
    start += text.startswith(b" ", start)
    if key < 0 or not text.startswith(b"[[", start):
        return text
    end = text.find(b"]]", start) + 1
    return text[: start + 1] + text[end:] if end else text


def connector_of(settings: PdSettings, query: Query) -> Connector:
    """Return the configured connector, or the one that detects it."""
    mooncake = Mooncake(query, settings.mooncake_bootstrap_port)
    if settings.connector == "nixl":
        return NixlPull()
    if settings.connector == "offloading":
        return Offloading(settings.offloading_port)
    return mooncake if settings.connector == "mooncake" else AutoDetect(NixlPull(), mooncake)


class NixlPull:
    """NixlConnector (NixlPullConnector) of vLLM 0.30 to 0.33."""

    def prefill_params(self, transfer_id: str) -> bytes:
        return b"{%b}" % _ASKED.encode()

    async def decode_params(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        """Implement ``Connector``. From vLLM 0.31 on the parameters already have ``cached_tokens``."""
        return self.read(answer)

    def leased(self, source: PrefillHolder) -> bool:
        return True

    def read(self, answer: bytes) -> TransferResult:
        """Read the parameters from the prefill engine's answer."""
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

    def prefill_params(self, transfer_id: str) -> bytes:
        return f'{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer_id}"}}'.encode()

    async def decode_params(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        found = await self._find(transfer_id, source, cached_tokens)
        if found in ("no connector", "unreadable"):
            return found
        try:
            return found if _ENDING.decode(answer).cut_short else "stopped"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "unreadable"

    def leased(self, source: PrefillHolder) -> bool:
        """Implement ``Connector``: the prefill engine sends only blocks that it knows to be there."""
        return False

    async def _find(
        self, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        """Look the engine up each time: after a restart it has another id. From vLLM 0.31 on a decode engine
        reports ``remote_prefill_cached_tokens`` instead of the whole prompt (v1/engine/output_processor.py).
        """
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


class Offloading:
    """OffloadingConnector with a ``p2p`` tier of vLLM 0.32 and 0.33; rank 0's listens on ``port``."""

    def __init__(self, port: int) -> None:
        self._port = port

    def prefill_params(self, transfer_id: str) -> bytes:
        return f'{{"remote_decoder":{{"kv_request_id":"{transfer_id}"}}}}'.encode()

    async def decode_params(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        # The answer carries nothing; engines read ``cached_tokens`` only next to ``do_remote_prefill``, which
        # other connectors beside this one would take for theirs.
        host, port = urlsplit(source.base_url).hostname, self._port + int(source.rank or 0)
        return _peer("remote_prefiller", transfer_id, host, port)

    def leased(self, source: PrefillHolder) -> bool:
        return False


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """A request's body, and the ``p2p`` tier from which its engine fetches what the tier's host memory holds
    of the prompt. The engine asks for each block by its hash and computes the others, so a wrong source
    costs a question (vllm/v1/kv_offload/tiering/p2p/manager.py ``lookup``, 0.32)."""

    body: SplitBody
    host: str
    port: int

    def asked_with(self, transfer_id: str, hint: bytes = b"") -> Generator[None, None, bytes]:
        """Steps to the engine's body; ``transfer_id`` is unique to this request."""
        return self.body.decode(source_params(transfer_id, self.host, self.port), hint)


def source_params(transfer_id: str, host: str, port: int) -> bytes:
    """Return ``kv_transfer_params`` of a request whose engine fetches blocks from this ``p2p`` tier;
    ``transfer_id`` is unique to the request."""
    return _peer("remote_kv_source", transfer_id, host, port)


def _peer(role: str, transfer_id: str, host: str | None, port: int) -> bytes:
    named = {"kv_request_id": transfer_id, "remote_host": host, "remote_port": port}
    return msgspec.json.encode({role: named})


class AutoDetect:
    """Sends a request that both connectors understand, and detects the connector from the answer."""

    def __init__(self, nixl: NixlPull, mooncake: Mooncake) -> None:
        self._nixl = nixl
        self._mooncake = mooncake
        self._have_mooncake: set[str] = set()

    def prefill_params(self, transfer_id: str) -> bytes:
        return f'{{{_ASKED},"transfer_id":"{transfer_id}"}}'.encode()

    async def decode_params(
        self, answer: bytes, transfer_id: str, source: PrefillHolder, cached_tokens: int | None = None
    ) -> TransferResult:
        result = self._nixl.read(answer)
        self._have_mooncake.discard(source.base_url)
        if result != "no connector":
            return result
        result = await self._mooncake.decode_params(answer, transfer_id, source, cached_tokens)
        if isinstance(result, bytes) and len(self._have_mooncake) < _ENGINES_MAX:
            self._have_mooncake.add(source.base_url)
        return result

    def leased(self, source: PrefillHolder) -> bool:
        return source.base_url not in self._have_mooncake
