"""The APIs whose requests carry a prompt, by path: what the proxy and the prompt reader tell apart.

All others are passed on to the least loaded engine.
"""

from __future__ import annotations

from typing import Final

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
BATCH: Final = "/v1/chat/completions/batch"
GENERATE: Final = "/inference/v1/generate"
COHERE: Final = "/cohere/v2/chat"
PROMPT_APIS: Final = {
    CHAT: "chat",
    COMPLETION: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    BATCH: "batch",
    GENERATE: "generate",
    COHERE: "cohere",
}
"""Path -> name, as metrics, receipts and explain have it."""
