"""What the two engines are told: all that depends on the connector that carries the blocks.

NIXL in pull mode: the prefill engine is asked to keep the blocks, and says in its answer where they are; the
decode engine is given that text as it is. Parameters that lack a part end a vLLM 0.32 server (an assertion in
its scheduler), so what is not whole is not handed over.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Told = bytes | Literal["no connector", "unreadable"]
"""The parameters for the decode engine, or why there are none: the engine holds nothing for anybody, or it is
not known what it holds."""


_NULL = msgspec.Raw(b"null")


class _Params(msgspec.Struct, gc=False):
    do_remote_prefill: msgspec.Raw = _NULL
    remote_block_ids: msgspec.Raw = _NULL
    remote_engine_id: msgspec.Raw = _NULL
    remote_request_id: msgspec.Raw = _NULL
    remote_host: msgspec.Raw = _NULL
    remote_port: msgspec.Raw = _NULL
    tp_size: msgspec.Raw = _NULL


class _Answer(msgspec.Struct, gc=False):
    kv_transfer_params: msgspec.Raw = _NULL


_ANSWER = msgspec.json.Decoder(_Answer)
_PARAMS = msgspec.json.Decoder(_Params)


class NixlPull:
    """NixlConnector (NixlPullConnector) of vLLM 0.30 to 0.33. ``asks``: ``kv_transfer_params`` of the request
    to the prefill engine."""

    asks = (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    )

    def read(self, answer: bytes) -> Told:
        """What the prefill engine's answer hands over."""
        try:
            params = bytes(_ANSWER.decode(answer).kv_transfer_params)
            if params == b"null":
                return "no connector"
            given = _PARAMS.decode(params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "unreadable"
        parts = [bytes(part) for part in msgspec.structs.astuple(given)]
        whole = parts[0] == b"true" and parts[1].startswith(b"[")
        return params if whole and b"null" not in parts else "unreadable"
