"""Response bodies of a simulated engine, field for field as vLLM writes them.

Pure functions from an ``Answer`` and token counts to JSON-ready dicts. Field names and null fields follow
vllm/entrypoints/openai of 0.32 with ``--enable-prompt-tokens-details``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.publisher.simulator.api_protocol import StreamOptions
from kvatlas.publisher.simulator.request import SimRequest

Json = dict[str, Any]

FINGERPRINT = "kvatlas-simulated-engine"


class Choice(msgspec.Struct, frozen=True):
    """One choice of a complete answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt: list[int]
    stop_reason: str | None = None


def usage_of(num_prompt_tokens: int, num_output_tokens: int, cached_tokens: int | None) -> Json:
    """Make a ``usage`` object."""
    usage: Json = {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "completion_tokens": num_output_tokens,
    }
    return (
        usage
        if cached_tokens is None
        else {**usage, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    )


class Answer(msgspec.Struct, frozen=True):
    """Fields common to all bodies of one answer. ``prompt_token_ids`` is set if the client wants ids."""

    request_id: str
    created: int
    model: str
    is_chat: bool
    num_prompt_tokens: int
    prompt_token_ids: list[int] | None = None

    def usage(self, num_output_tokens: int, cached_tokens: int | None = None) -> Json:
        """The ``usage`` object, with prompt details if ``cached_tokens`` is given."""
        return usage_of(self.num_prompt_tokens, num_output_tokens, cached_tokens)

    def full(self, given: list[Choice], cached_tokens: int, handed: Json | None = None) -> Json:
        """The complete body; ``handed`` are a prefill engine's ``kv_transfer_params``."""
        choices = [self._full_choice(index, choice) for index, choice in enumerate(given)]
        usage = self.usage(sum(len(choice.token_ids) for choice in given), cached_tokens)
        unset = {"created_cache_tokens": 0 if self.is_chat else None, "multimodal_tokens": None}
        usage["prompt_tokens_details"] |= unset
        body = {
            **self._head("chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**usage, "completion_tokens_details": None},
            "kv_transfer_params": handed,
            **dict.fromkeys(("ec_transfer_params", "metrics")),
        }
        owners = [body] if self.is_chat else choices
        for owner, choice in zip(owners, given, strict=False):
            prompt = None if self.prompt_token_ids is None else choice.prompt
            owner |= {"prompt_logprobs": None, "prompt_token_ids": prompt}
        if self.is_chat:
            body["prompt_text"] = None
        return body

    def opening(self, index: int = 0) -> Json:
        """The first chunk of a choice in a chat's stream: the role, no text."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**body, "prompt_token_ids": self.prompt_token_ids, "prompt_text": None}

    def chunk(
        self,
        text: str,
        token_ids: list[int],
        finish_reason: str | None,
        *,
        first: bool,
        last: bool,
        index: int = 0,
    ) -> Json:
        """The chunk of some tokens (none if it was aborted without); ``last``: no usage chunk follows."""
        choice: Json = (
            {"index": index, "delta": {"content": text}} if self.is_chat else {"index": index, "text": text}
        )
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        if not self.is_chat or finish_reason is not None:
            choice["stop_reason"] = None
        if not self.is_chat:
            choice["prompt_token_ids"] = self.prompt_token_ids if first else None
        choice["token_ids"] = token_ids if self.prompt_token_ids is not None else None
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**body, "system_fingerprint": FINGERPRINT} if last else body

    def closing(self, num_output_tokens: int, cached_tokens: int) -> Json:
        """The stream's last chunk if usage is included: no choice, unset fields omitted."""
        usage = self.usage(num_output_tokens, cached_tokens)
        if self.is_chat:
            usage["prompt_tokens_details"]["created_cache_tokens"] = 0
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}

    def _head(self, chat_object: str) -> Json:
        kind = chat_object if self.is_chat else "text_completion"
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}

    def _full_choice(self, index: int, given: Choice) -> Json:
        if not self.is_chat:
            choice: Json = {"index": index, "text": given.text}
        else:
            unset = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            choice = {"index": index, "message": {"role": "assistant", "content": given.text, **unset}}
        choice |= {"logprobs": None, "finish_reason": given.finish_reason, "stop_reason": given.stop_reason}
        token_ids = given.token_ids if self.prompt_token_ids is not None else None
        return {**choice, "routed_experts": None, "token_ids": token_ids}


def model_list(model: str, root: str, max_model_len: int, created: int, *, owner: str = "vllm") -> Json:
    """Body of GET /v1/models; ``owner``: as the frontend of this name answers."""
    permission = {
        "id": f"modelperm-{model}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {"id": model, "object": "model", "created": created, "owned_by": owner, "root": root}
    card |= {"parent": None, "max_model_len": max_model_len}
    card |= {"permission": [permission]} if owner == "vllm" else {}
    return {"object": "list", "data": [card]}


def rendered(
    request_id: str,
    token_ids: list[int],
    *,
    model: str | None,
    max_tokens: int,
    stream: bool,
    stream_options: StreamOptions | None,
    cache_salt: str | None,
) -> Json:
    """One item of POST /v1/.../render: a request for token-in token-out generation."""
    body: Json = {"request_id": request_id, "token_ids": token_ids, "token_offsets": None, "features": None}
    body |= {"content_parts": None, "sampling_params": {"max_tokens": max_tokens}, "model": model}
    body |= {"stream": stream, "stream_options": stream_options if stream else None}
    body |= {"cache_salt": cache_salt, "priority": 0}
    return {**body, "kv_transfer_params": None, "ec_transfer_params": None}


def generated(
    request_id: str, num_prompt_tokens: int, request: SimRequest, finish_reason: str, *, model: str
) -> Json:
    """Body of POST /inference/v1/generate."""
    choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "token_ids": request.output}
    usage = usage_of(num_prompt_tokens, len(request.output), request.cached_tokens or 0)
    body = {"request_id": request_id, "model": model, "usage": usage, "prompt_logprobs": None}
    return {**body, "output_mode": "tokens", "choices": [choice], "kv_transfer_params": request.handed}


def tokenized(token_ids: list[int], strings: list[str] | None, max_model_len: int) -> Json:
    body = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
    return {**body, "token_strs": strings}
