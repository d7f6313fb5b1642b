"""Request bodies and errors of a simulated engine, in vLLM's shapes.

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
