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
# Path -> name, as metrics, receipts and explain have it.
PROMPT_APIS: Final = {
    CHAT: "chat",
    COMPLETION: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    BATCH: "batch",
    GENERATE: "generate",
    COHERE: "cohere",
}
# Where vLLM 0.32 and 0.33 take ``cache_salt`` (its Rust frontend has only the first, second and sixth of the
# prompt APIs). ``CohereChatV2Request``, ``CohereEmbedRequest`` and audio forms have no such field.
SALTED: Final = frozenset(
    {
        *(PROMPT_APIS.keys() - {COHERE}),
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/decisions",
        "/v1/systemone",
        "/generative_scoring",
    }
)
# SGLang 0.5.23 drops the field of all others unseen (entrypoints/anthropic/protocol.py, among others).
SALTED_BY_SGLANG: Final = frozenset({CHAT, COMPLETION, RESPONSES})
# No block is stored for them. Rendered prompts are sent to ``GENERATE``, where they get their salt.
UNCACHED: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        MESSAGES + "/count_tokens",
        *(f"{path}/render" for path in (CHAT, COMPLETION, MESSAGES, RESPONSES)),
        *(f"{path}/derender" for path in (CHAT, COMPLETION)),
    }
)
