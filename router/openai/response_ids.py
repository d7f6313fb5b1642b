"""Ids of stored responses (Responses API): chosen by the router, so that an id proves whose it is.

``resp_`` + nonce + proof + engine, in hexadecimal digits. The proof is an HMAC-SHA256 over tenant and nonce
under a secret that all routers know: a configured one, or one of the tenant's keys. The router checks it with
the name of the tenant that asks: nothing is looked up, so no store, sibling or restart decides about rights.
The engine is a part of its id's digest; made up, it leads to an engine that has no such response. Engines
take the id from ``request_id`` of the body (vLLM 0.20 to 0.33, entrypoints/openai/responses/protocol.py;
SGLang 0.5.23 and TensorRT-LLM have the same field).

Invariant: no client chooses an id. What has not this form, or another tenant's proof, is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from kvatlas.router.openai.members import before_others

FIELD: Final = b"request_id"
PREFIX: Final = "resp_"
_NONCE_DIGITS: Final = 20
_PROOF_DIGITS: Final = 32
_ENGINE_DIGITS: Final = 12
_ID: Final = re.compile(
    rf"{PREFIX}([0-9a-f]{{{_NONCE_DIGITS}}})([0-9a-f]{{{_PROOF_DIGITS}}})([0-9a-f]{{{_ENGINE_DIGITS}}})"
)
_NO_SECRET: Final = b"without keys"


class ResponseIds:
    """``secrets``, by tenant and id of the key in use ("": any): the one under which ids are made, then
    others that count. Only without keys, where ``tenant`` is "", it is a constant: a tenant that has no
    secret owns nothing."""

    def __init__(
        self, secrets: Callable[[str, str], Sequence[bytes]] = lambda tenant, key_id: (_NO_SECRET,)
    ) -> None:
        self._secrets = secrets

    def make(self, tenant: str, key_id: str = "") -> str:
        """The id of a response to come, but for its engine (``of_engine``)."""
        nonce = f"{random.getrandbits(4 * _NONCE_DIGITS):0{_NONCE_DIGITS}x}"
        secrets = self._secrets(tenant, key_id)
        return PREFIX + nonce + _proof(secrets[0] if secrets else random.randbytes(32), tenant, nonce)

    def is_of(self, response_id: str, tenant: str) -> bool:
        """Whether a router made this id for this tenant."""
        found = _ID.fullmatch(response_id)
        if found is None:
            return False
        nonce, proof, _ = found.groups()
        made = (_proof(secret, tenant, nonce) for secret in self._secrets(tenant, ""))
        return any(hmac.compare_digest(proof, one) for one in made)


def _proof(secret: bytes, tenant: str, nonce: str) -> str:
    # Salts of tenants are made under the same secret: their messages begin with another word.
    message = msgspec.json.encode(["response", tenant, nonce])
    return hmac.digest(secret, message, hashlib.sha256).hex()[:_PROOF_DIGITS]


def of_engine(owned: str, engine_id: str) -> str:
    """The whole id, where this engine is given the request."""
    return owned + digits_of(engine_id)


def engine_digits(response_id: str) -> str | None:
    """The digits of an id that name its engine; None for one that no router made."""
    found = _ID.fullmatch(response_id)
    return None if found is None else found[3]


@lru_cache(maxsize=8192)
def digits_of(engine_id: str) -> str:
    """The digits that name this engine in ids."""
    return hashlib.sha256(engine_id.encode()).hexdigest()[:_ENGINE_DIGITS]


def with_id(body: bytes, response_id: str) -> tuple[bytes, bytes | memoryview]:
    """The body with this id, in two parts of which the second is not copied. The same body where it is no
    object with members, which engines refuse."""
    return before_others(body, FIELD, b'"%b"' % response_id.encode())
