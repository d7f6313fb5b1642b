"""What every tool that asks a running router knows: where its ops port is, its token, what a refusal says."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from router.config.schema import OPS_PORT

OPS_URL = f"http://127.0.0.1:{OPS_PORT}"
TOKEN_VARIABLE = "KVATLAS_OPS_TOKEN"  # noqa: S105  # its name
"""The environment variable with the token of a router that wants one (``server.ops_token_file``)."""
_TEXT_MAX = 300


def ops_headers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers for a router's ops port; to be sent to nobody else."""
    token = environ.get(TOKEN_VARIABLE, "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}


def reason(body: bytes, code: str = "") -> str:
    """The message of an error in OpenAI's shape (with this code, where given); "" where it is none."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"])[:_TEXT_MAX] if code in {"", error.get("code")} else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return ""
