"""Estimates of a request's tokens by its size, charged until an engine reports usage.

Where a prompt's tokens are known they count. Else these estimates do: of the order of what engines report,
rather above it, so that no tenant gets far ahead of a limit while many requests are under way.
"""

from __future__ import annotations

from typing import Final

from router.openai.request import InboundRequest

_TEXT_BYTES: Final = 4
"""Bytes of text for a token."""
_BYTES: Final = {"multimodal": 512, "embeds": 8192}
"""The same by reason why a prompt was not read: images in base64 (a JPEG of 1 MB is some 2,500 tokens), and
prompt embeddings (4,096 values of 16 bits, in base64, are 11 kB)."""
_FORM_BYTES: Final = 640
"""Audio at 16 kHz with 16 bits, 50 tokens a second."""
_FREE: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""No model runs for these."""


def estimated_tokens(request: InboundRequest, reason: str | None) -> int:
    """Prompt tokens by the size of the body; ``reason``: why its prompt was not read, None where its API has
    none that is read here."""
    size = len(request.body)
    if request.path in _FREE or request.path.endswith(("/render", "/derender")) or request.method != "POST":
        return 0
    if reason is not None:
        return size // _BYTES.get(reason, _TEXT_BYTES)
    is_form = bytes(request.body[:2]) == b"--"
    return size // (_FORM_BYTES if is_form else _TEXT_BYTES)
