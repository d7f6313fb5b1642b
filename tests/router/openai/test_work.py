"""The work of a request is counted whole, and once: all prompts, all answers, in every account."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.admission.tenants import Tenant, TenantRequest
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.estimates import estimated_tokens, pooled
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.openai.work import NO_WORK, Work
from kvatlas.router.prompts.asked_counts import answers_beside


@pytest.mark.parametrize(
    ("work", "usage", "computed"),
    [
        # One prompt, one answer: the report is right.
        (Work(100, 1000), None, 100),
        (Work(100, 1000), Usage(1000, 5, 700), 300),
        (Work(100, 1000), Usage(1000, 5), 100),
        (Work(100, 1000, known=False), Usage(800, 5), 800),
        (Work(100, 1000), Usage(10, 5, 700), 0),
        # Three answers: the cached tokens are those of a sibling, which hit what the first one stored.
        (Work(278, 274, 1, 3, 4), Usage(274, 9, 256), 278),
        (Work(278, 274, 1, 3, 4), Usage(274, 9), 278),
        (Work(24, 274, 1, 3, 4), Usage(274, 9, 272), 24),
        (Work(278, 274, 1, 3, 4), Usage(300, 9, 256), 304),
        (Work(40, 60, 1, 3, 32, known=False), Usage(274, 9, 256), 306),
        # Many prompts: their number of tokens is right, the cached ones are those of the last.
        (Work(9000, 10_000, 256), Usage(11_000, 256, 16), 10_000),
        (Work(9000, 10_000, 256, known=False), Usage(11_000, 256, 16), 11_000),
        (Work(10, 10_000, 256), Usage(5, 256, 16), 0),
    ],
)
def test_computed_tokens(work: Work, usage: Usage | None, computed: int) -> None:
    assert work.computed(usage) == computed
    if usage is not None and work.sequences == 1:
        assert work.cached(usage) == (usage.cached_tokens or 0) or computed == 0


@pytest.mark.parametrize(
    ("path", "method", "body", "reason", "tokens"),
    [
        ("/v1/embeddings", "POST", b"x" * 4000, None, 1000),
        ("/v1/completions", "POST", b"x" * 4000, "no_tokenizer", 1000),
        ("/v1/chat/completions", "POST", b"x" * 5120, "multimodal", 10),
        ("/v1/audio/transcriptions", "POST", b"--" + b"x" * 6398, None, 10),
        ("/tokenize", "POST", b"x" * 60_000, None, 938),
        ("/v1/messages/count_tokens", "POST", b"x" * 6400, None, 101),
        ("/v1/chat/completions/render", "POST", b"x" * 6400, None, 101),
        ("/detokenize", "POST", b"x", None, 1),
        ("/v1/models", "GET", b"", None, 0),
        ("/reset_prefix_cache", "POST", b"", None, 0),
        ("/tokenize", "POST", b"", None, 0),
    ],
)
def test_an_estimate_by_size(path: str, method: str, body: bytes, reason: str | None, tokens: int) -> None:
    assert estimated_tokens(InboundRequest(method, path, b"", [], body), reason) == tokens


def test_cached_tokens_of_a_report() -> None:
    assert NO_WORK.cached(Usage(100, 1, 64)) == 64
    assert NO_WORK.cached(Usage(100, 1, 0)) == 0
    assert NO_WORK.cached(Usage(100, 1, 200)) == 100, "no more than the prompt"
    assert NO_WORK.cached(Usage(100, 1, None)) == 0


def test_requests_that_came_together_are_not_all_let_in_before_the_first_is_charged() -> None:
    tenant = Tenant("acme", TenantRules(uncached_tokens_per_minute=1000), 0.0)
    entries = [TenantRequest(tenant, lambda: 0.0) for _ in range(12)]
    entries[0].placed(Work(60_000, 60_000, 256))
    for entry in entries[1:]:
        with pytest.raises(ApiError) as refused:
            entry.placed(Work(60_000, 60_000, 256))
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        entry.leave(None, served=False)
    # A retry of one that was let in is no new request.
    entries[0].placed(Work(50_000, 60_000, 256))
    assert tenant.stats.uncached_tokens == 50_000


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        (b'{"n": 64, "messages": [' + b"x" * 9000, 64),
        (b'{"messages": [' + b"x" * 9000 + b'], "n":7}', 7),
        (b'{"messages": [' + b"x" * 9000 + b'], "n":999999999}', 1 << 14),
        (b'{"messages": [' + b"x" * 9000 + b'], "n":0}', 1),
        (b'{"n": 1, "messages": [' + b"x" * 9000 + b'], "n": "128"}', 128),
        (b'{"n": 128.0, "messages": [' + b"x" * 9000 + b'], "x": {"n": 1}}', 128),
        (b'{"messages": [' + b"x" * 9000 + b'], "n":1.28e2}', 128),
        (b'{"messages": ["say \\"n\\": 5"' + b"x" * 9000 + b"]}", 1),
        (b'{"messages": [' + b"x" * 9000 + b"]}", 1),
    ],
)
def test_the_answers_of_a_body_that_is_not_decoded(body: bytes, answers: int) -> None:
    assert answers_beside(body) == answers


@pytest.mark.parametrize(
    ("path", "body", "prompts", "more"),
    [
        ("/rerank", {"query": "q" * 398, "documents": ["a", "b", "c"]}, 3, 200),
        ("/v2/rerank", {"documents": ["a"] * 1000, "query": "q" * 398}, 1000, 99_900),
        ("/v1/rerank/", {"query": "q" * 398, "documents": ["a"], "x": float("nan")}, 1, 0),
        ("/v1/rerank", {"query": "q" * 398, "documents": ["a"] * 5, "x": float("nan")}, 5, 400),
        ("/rerank", {"query": "q" * 398, "documents": {"content": [{"type": "text"}] * 3}}, 3, 200),
        ("/score", {"text_1": "q" * 398, "text_2": ["a", "b"]}, 2, 100),
        ("/v1/score", {"queries": ["q" * 398], "documents": ["a", "b"]}, 2, 100),
        ("/score", {"text_1": ["q" * 398, "r"], "text_2": ["a", "b"]}, 2, 0),
        ("/score", {"data_1": "q", "data_2": "a"}, 1, 0),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3, 0),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 2, 0),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1, 0),
        ("/v1/embeddings", {"input": "a"}, 1, 0),
        ("/v1/embeddings", {"input": []}, 1, 0),
        ("/v2/embed", {"texts": ["a", "b"]}, 2, 0),
        ("/pooling", {"messages": [{"role": "user"}] * 3}, 1, 0),
        ("/classify", {"input": ["a"] * 4}, 4, 0),
        # Of large bodies the quotes are counted, also those of the name.
        ("/classify", {"input": ["a" * 999_999] * 5}, 6, 0),
        ("/classify", {"input": ["a"] * 100_000}, 100_001, 0),
        ("/v1/embeddings", {"input": [7] * 100_000}, 1, 0),
        ("/v1/chat/completions", {"input": ["a"] * 4}, 1, 0),
        ("/rerank", [], 1, 0),
    ],
)
def test_each_document_and_each_input_is_a_prompt(path: str, body: Any, prompts: int, more: int) -> None:
    text = json.dumps(body).encode()
    assert pooled(InboundRequest("POST", path, b"", [], text)) == (prompts, more)
    assert pooled(InboundRequest("POST", path, b"", [], b"no json")) == (1, 0)
