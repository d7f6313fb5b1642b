"""The prompt that ``kvatlas explain`` is asked about: token ids as they stand, or a request read as the
router reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from publisher.block_hash import HashScheme, PromptExtras, block_hashes
from publisher.events import BlockHash
from router.config.schema import Config, ModelConfig
from router.index.model import HashedPrompt
from router.openai.apis import CHAT, COMPLETION, PROMPT_APIS, RESPONSES
from router.openai.body import peek
from router.openai.errors import ApiError
from router.openai.request import InboundRequest
from router.prompts.config import ANY_MODEL, ModelPrompts
from router.prompts.origin.locate import Locator
from router.prompts.origin.problem import TokenizerProblem
from router.prompts.origin.source import parse_source
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.tools.verify.traces import TraceProbe

BODY_BYTES_MAX = 64 << 20
PATHS: Final = {name: path for path, name in PROMPT_APIS.items()}
"""What ``--api`` may say."""
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class PromptError(Exception):
    """A request that cannot be asked about; the message names the file and the reason."""


class TokenPrompt:
    """A prompt given as token ids."""

    def __init__(self, token_ids: Sequence[int], extras: PromptExtras) -> None:
        self.token_ids = token_ids
        self.extras = extras

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        return block_hashes(self.token_ids, scheme, self.extras)


class _Fields(msgspec.Struct):
    """What of a body decides how it is read."""

    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_body(path: Path) -> bytes:
    """The request's file. Raises ``PromptError``."""
    try:
        with path.open("rb") as file:
            body = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from None
    if len(body) > BODY_BYTES_MAX:
        raise PromptError(f"{path}: over {BODY_BYTES_MAX} bytes")
    return body


def endpoint_of(path: Path, body: bytes, api: str | None) -> str:
    """The path of ``api``; else that of a chat, completion or response, or ``tokens``, by the fields of the
    body. Raises ``PromptError``."""
    if api is not None:
        return PATHS[api]
    fields = _fields(path, body)
    if fields.token_ids is not msgspec.UNSET:
        return "tokens"
    if fields.messages is not msgspec.UNSET:
        return CHAT
    if fields.prompt is not msgspec.UNSET:
        return COMPLETION
    if fields.input is not msgspec.UNSET:
        return RESPONSES
    raise PromptError(f"{path}: expected messages, prompt, input or token_ids in it")


def router_body(path: Path, body: bytes, api: str | None) -> bytes:
    """The body in a form that a router's explain endpoint takes: token ids become a completion prompt."""
    if endpoint_of(path, body, api) != "tokens":
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None
    fields["prompt"] = fields.pop("token_ids")
    return msgspec.json.encode(fields)


def read_prompt(path: Path, body: bytes, config: Config, api: str | None) -> HashedPrompt:
    """The prompt of a request. Raises ``PromptError``, for text also where no tokenizer is configured."""
    endpoint = endpoint_of(path, body, api)
    if endpoint == "tokens":
        return _tokens(path, body)
    plain = _fields(path, body)
    if endpoint == COMPLETION and plain.cache_salt is msgspec.UNSET and not config.models:
        ids = _ids(plain.prompt)
        if ids is not None:
            return _checked(path, ids, PromptExtras())
    return asyncio.run(_read(path, body, endpoint, config))


def _tokens(path: Path, body: bytes) -> HashedPrompt:
    try:
        probe = msgspec.json.decode(body, type=TraceProbe)
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None
    return _checked(path, probe.token_ids, probe.extras())


def _checked(path: Path, token_ids: list[int], extras: PromptExtras) -> TokenPrompt:
    if not token_ids:
        raise PromptError(f"{path}: no tokens in it")
    if min(token_ids) < 0 or max(token_ids) >= 1 << 32:
        raise PromptError(f"{path}: token ids must lie in 0..{(1 << 32) - 1}")
    return TokenPrompt(token_ids, extras)


def _ids(raw: msgspec.Raw | msgspec.UnsetType) -> list[int] | None:
    """The prompt if it is one list of token ids."""
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return msgspec.json.decode(raw, type=list[int])
    except _BAD_JSON:
        return None


def _fields(path: Path, body: bytes) -> _Fields:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except _BAD_JSON as error:
        raise PromptError(f"{path}: {error}") from None


async def _located(model: ModelConfig, locator: Locator) -> ModelPrompts:
    """Without an engine there is no other source than a directory or a name. Raises ``TokenizerProblem``."""
    source, prompts = parse_source(model.tokenizer), model.prompts()
    if source.kind != "repository":
        return prompts
    found = await locator.locate(source)
    return msgspec.structs.replace(prompts, tokenizer_dir=str(found.folder))


async def _read(path: Path, body: bytes, endpoint: str, config: Config) -> HashedPrompt:
    async def nobody(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        raise OSError("there is no engine to ask")

    try:
        locator = Locator(config.prompts)
        models = {name: await _located(config.model(name), locator) for name in {*config.models, ANY_MODEL}}
        reader = PromptReader(models, config.prompts, nobody)
    except ValueError as error:
        raise PromptError(str(error)) from None
    except TokenizerProblem as problem:
        raise PromptError(f"{problem}; {problem.remedy}") from None
    try:
        peeked = peek(body)
        read = await reader.read(InboundRequest("POST", endpoint, b"", [], body, peeked.model, peeked.stream))
    except ApiError as error:
        raise PromptError(f"{path}: {error.message}") from None
    finally:
        reader.close()
    if not isinstance(read, Prompt):
        hint = "; give --tokenizer DIR or ORG/NAME, or token_ids" if read.reason == "no_tokenizer" else ""
        raise PromptError(f"{path}: its tokens cannot be computed here ({read.reason}){hint}")
    return read
