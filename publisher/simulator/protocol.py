"""What clients may ask a simulated engine, and how it says no, in vLLM's shapes.

Bodies are decoded into msgspec structs; fields that vLLM knows and that change nothing here (temperature
and other sampling parameters) are accepted and ignored. Errors carry vLLM's body
``{"error": {message, type, param, code}}`` with the HTTP status as an integer ``code``.
Facts: vllm/entrypoints/openai and vllm/entrypoints/serve of 0.32.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

COMPLETION_TOKENS_DEFAULT = 16
"""``max_tokens`` of /v1/completions where the client names none (OpenAI's default, also vLLM's)."""
CACHE_SALT_LENGTH_MAX = 1024

_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class EngineError(Exception):
    """An answer that is not a success."""

    def __init__(self, status: HTTPStatus, message: str, *, kind: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or status.phrase
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status.value}
        return msgspec.json.encode({"error": error})


def invalid(message: str, *, param: str | None = None) -> EngineError:
    """400: the request is well formed and asks for what cannot be."""
    return EngineError(HTTPStatus.BAD_REQUEST, message, kind="BadRequestError", param=param)


def malformed(message: str) -> EngineError:
    """400: the body is not what the endpoint reads."""
    return EngineError(HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {message}")


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
    return invalid(message, param="input_tokens")


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
    request_id: str | None = None

    def check(self) -> None:
        """Raises ``EngineError`` for values no engine, or not this one, can serve."""
        if self.n not in (None, 1):
            raise invalid("the simulated engine generates one choice per request (n = 1)", param="n")
        if self.stream_options is not None and not self.stream:
            raise invalid("Stream options can only be defined when `stream=True`.", param="stream_options")
        salt = self.cache_salt
        if salt is not None and not 0 < len(salt) <= CACHE_SALT_LENGTH_MAX:
            raise invalid(
                "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
            )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


class ChatRequest(_Generation, kw_only=True):
    """Body of POST /v1/chat/completions and its /render; the second half reaches the chat template."""

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
        """Raises ``EngineError`` for what cannot be rendered, whatever the template."""
        if not self.messages:
            raise invalid("messages must not be empty", param="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if self.chat_template is not None:
            raise invalid("Chat template is passed with request, but this engine does not trust it.")


class CompletionRequest(_Generation, kw_only=True):
    """Body of POST /v1/completions and its /render: text or token ids, one prompt."""

    prompt: str | list[_TokenId] | list[str] | list[list[_TokenId]]
    add_special_tokens: bool = True

    def single_prompt(self) -> str | list[int]:
        """The one prompt. Raises ``EngineError`` for a batch of several."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise invalid("the simulated engine takes one prompt per request", param="prompt")
            return prompt[0]
        return prompt  # type: ignore[return-value]  # a str or a list of ints here


class TokenizeChatRequest(ChatRequest, kw_only=True):
    """Body of POST /tokenize with messages: a chat request of which only the prompt matters."""

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
    """The body as ``kind``. Raises ``EngineError`` (400) saying where it is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(str(error)) from None
