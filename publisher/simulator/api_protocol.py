"""Request bodies, response bodies and errors of a simulated engine, in vLLM's shapes.

Bodies are decoded into msgspec structs. vLLM's fields without an effect here (temperature and other sampling
parameters) are accepted and ignored. Errors carry vLLM's body
``{"error": {message, type, param, code}}`` with the HTTP status as an integer ``code``.
Facts: vllm/entrypoints/openai and vllm/entrypoints/serve of 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from kvatlas.publisher.simulator.kv_messages import TransferParams
from kvatlas.publisher.simulator.request import SimRequest

# Default ``max_tokens`` of /v1/completions (OpenAI's default, also vLLM's).
COMPLETION_TOKENS_DEFAULT = 16
CACHE_SALT_LENGTH_MAX = 1024
CHOICES_MAX = 64
_GREEDY_BELOW = 1e-5

_ERROR_PATH = re.compile(r"at `\$([^`]*)`$")
_PATH_PART = re.compile(r"[^.\[\]]+")
# Form of msgspec's messages.
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")

_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class EngineError(Exception):
    """An error response."""

    def __init__(self, status: HTTPStatus, message: str, *, kind: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or status.phrase
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status.value}
        return msgspec.json.encode({"error": error})


class UnroutedError(EngineError):
    """Unknown path or method: the body has the shape of vLLM's web framework."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status, status.phrase)

    def body(self) -> bytes:
        return msgspec.json.encode({"detail": self.message})


def invalid(message: str, *, param: str | None = None, value: object = None) -> EngineError:
    """400: the request is well formed but has an invalid value."""
    if param is not None:
        message += f" (parameter={param}" + ("" if value is None else f", value={value}") + ")"
    return EngineError(HTTPStatus.BAD_REQUEST, message, kind="BadRequestError", param=param)


def malformed(message: str) -> EngineError:
    """400: the body has another shape. ``param`` is the position, if the message has it."""
    where = _ERROR_PATH.search(message)
    missing = _MISSING_FIELD.search(message)
    parts = [*_PATH_PART.findall(where.group(1) if where else ""), *(missing.groups() if missing else ())]
    param = ".".join(("body", *parts)) if parts else None
    return EngineError(HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {message}", param=param)


def unknown_model(model: str, served: str) -> EngineError:
    """404: this engine serves another model."""
    message = f"The model `{model}` does not exist. Valid aliases: {served}."
    return EngineError(HTTPStatus.NOT_FOUND, message, kind="NotFoundError", param="model")


def prompt_too_long(num_tokens: int, max_model_len: int) -> EngineError:
    """400: no room for even one output token."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{num_tokens} input tokens, which exceeds this limit even without any output tokens. "
        f"Please reduce the length of the input prompt."
    )
    return invalid(message, param="input_tokens", value=num_tokens)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _Generation(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    temperature: float | None = None
    use_beam_search: bool = False
    kv_transfer_params: TransferParams | None = None
    priority: int = 0

    def check(self) -> None:
        """Raise ``EngineError`` for invalid values and for those that are not simulated."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= CHOICES_MAX:
            raise invalid(f"n must be at least 1 and at most {CHOICES_MAX}, got {n}.", param="n", value=n)
        if n > 1 and self.temperature is not None and self.temperature < _GREEDY_BELOW:
            raise invalid(f"n must be 1 when using greedy sampling, got {n}.")
        if self.stream_options is not None and not self.stream:
            raise invalid("Stream options can only be defined when `stream=True`.", param="stream_options")
        salt = self.cache_salt
        if salt is not None and not 0 < len(salt) <= CACHE_SALT_LENGTH_MAX:
            raise invalid(
                "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
            )

    @property
    def stop_strings(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


class ChatRequest(_Generation, kw_only=True):
    """Body of POST /v1/chat/completions and its /render; the second half goes to the chat template."""

    max_completion_tokens: int | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_template(self) -> None:
        """Raise ``EngineError`` for a request that no template can render."""
        if not self.messages:
            raise invalid(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if self.chat_template is not None:
            raise invalid("Chat template is passed with request, but this engine does not trust it.")


class CompletionRequest(_Generation, kw_only=True):
    """Body of POST /v1/completions and its /render: texts or lists of token ids, one answer for each."""

    prompt: str | list[_TokenId | str | list[_TokenId]]
    add_special_tokens: bool = True

    def prompts(self) -> Sequence[str | list[int]]:
        """List the prompts. Raises ``EngineError`` for none, or for a mixture of types."""
        prompt = self.prompt
        if prompt == "":
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if not prompt:
            raise invalid("You must pass at least one prompt")
        if isinstance(prompt, str):
            return [prompt]
        token_ids = [item for item in prompt if isinstance(item, int)]
        if len(token_ids) == len(prompt):
            return [token_ids]
        texts = [item for item in prompt if isinstance(item, str)]
        lists = [item for item in prompt if isinstance(item, list)]
        if len(prompt) not in (len(texts), len(lists)):
            raise invalid("all prompts must be of one type", param="prompt")
        return texts or lists


class SamplingParams(msgspec.Struct, kw_only=True):
    """The fields of ``sampling_params`` that have an effect here."""

    max_tokens: int = COMPLETION_TOKENS_DEFAULT
    min_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: list[_TokenId]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    cache_salt: str | None = None
    kv_transfer_params: TransferParams | None = None

    def completion(self) -> CompletionRequest:
        """Convert to a completion. Raises ``EngineError`` for values that are not simulated."""
        if self.stream or self.sampling_params.n != 1:
            text = "the simulated engine generates one sequence of tokens per request, not streamed"
            raise invalid(text, param="stream" if self.stream else "n")
        return CompletionRequest(
            model=self.model,
            prompt=[*self.token_ids],
            max_tokens=self.sampling_params.max_tokens,
            min_tokens=self.sampling_params.min_tokens,
            ignore_eos=self.sampling_params.ignore_eos,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )


class TokenizeChatRequest(ChatRequest, kw_only=True):
    """Body of POST /tokenize with messages: only the prompt of the chat request matters."""

    return_token_strs: bool | None = False


class TokenizeTextRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[_TokenId]
    model: str | None = None


_Body = TypeVar("_Body")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a body as ``kind``. Raises ``EngineError`` (400) with the position of the fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(str(error)) from None


# Response bodies of a simulated engine, field for field as vLLM writes them.
#
# Pure functions from an ``Answer`` and token counts to JSON-ready dicts. Field names and null fields follow
# vllm/entrypoints/openai of 0.32 with ``--enable-prompt-tokens-details``.


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
