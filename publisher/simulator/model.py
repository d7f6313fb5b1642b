"""The simulated model: its name, its prompt reading, its answers.

It turns decoded request bodies into token ids and limits, with vLLM's checks (model name, prompt length,
token range, max_tokens), and makes the scheduler's requests from them. Texts longer than
``_INLINE_CHARS_MAX`` are tokenized in a thread, so that the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import xxhash

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.publisher.groups import Family
from kvatlas.publisher.simulator import metrics as stats
from kvatlas.publisher.simulator.api_protocol import (
    COMPLETION_TOKENS_DEFAULT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    invalid,
    prompt_too_long,
    unknown_model,
)
from kvatlas.publisher.simulator.kv_messages import TransferParams, TransferStats
from kvatlas.publisher.simulator.request import Sampler, SimRequest
from kvatlas.publisher.simulator.settings import EngineSettings, release, resolve_groups
from kvatlas.publisher.simulator.tokenizer import ChatTokenizer, TemplateError, shared_tokenizer

_SPACED = re.compile("Ġ[a-z]{3,}")
_PLAIN = re.compile("[a-z]{3,}")
_OUTPUT_TOKENS_MIN = 8
_CHARACTERS = "🙂🚀🌱🔧漢字水火木金"
_CHARACTER_EVERY = 4
# Character that occurs in wrong answers only, in no prompt of random ids that an answer may repeat.
WRONG_MARK = "⛔"
# Text of an answer from blocks that were reused before they were read.
_WRONG_ANSWER = f"{WRONG_MARK}WRONG KV CACHE{WRONG_MARK} "
_WRONG_TIMES = 4


class Continuation:
    """The token ids that follow a prompt, produced one by one; ends with the end-of-text token.

    Each is a function of all ids before it. So a prompt that ends with the beginning of its own answer is
    continued by the rest of that.
    """

    def __init__(self, source: TextSource, prompt: Sequence[int]) -> None:
        ids = array("I", prompt)
        begin, rest = source.begun(ids)
        self.source = source
        self._given = len(ids) - begin
        self._length = source.length(ids[:begin])
        self._rest = list(rest)
        self._last = ids[-1]
        self._before = source.hashed(ids)

    def token(self, index: int, *, ignore_eos: bool) -> int:
        """The ``index``-th generated token; call in order, once each."""
        if not self._rest:
            if self._given + index >= self._length and not ignore_eos:
                return self.source.eos_id
            self._rest = list(self.source.unit(self._before.intdigest(), self._last))
        self._last = self._rest.pop(0)
        self._before.update(array("I", (self._last,)).tobytes())
        return self._last


class WrongContinuation(NamedTuple):
    """A visibly wrong answer, for KV of another prompt: always the same words."""

    token_ids: list[int]
    eos_id: int

    def token(self, index: int, *, ignore_eos: bool) -> int:
        if index >= len(self.token_ids) * _WRONG_TIMES and not ignore_eos:
            return self.eos_id
        return self.token_ids[index % len(self.token_ids)]


class TextSource:
    """Source of continuations; the same prompt and seed give the same text on every engine.

    Generated text: words, each chosen by a hash of all ids before it, and with ``characters`` in a quarter of
    their places a character of several tokens.

    Only vocabulary entries are used that are a whole word and that their own text tokenizes back to. The
    first word has a leading space unless the prompt ends in white space or in a special token. So
    ``encode(decode(ids)) == ids`` also when a chat template puts the text into the next turn's prompt, and
    that turn hits the generated tokens.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, seed: int, natural_tokens_max: int, characters: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._bare: dict[int, bool] = {}
        self._characters = _characters(tokenizer) if characters else []
        self._unit_tokens = sorted({1, *map(len, self._characters)})
        self._seed = seed
        self._natural_tokens_max = max(natural_tokens_max, _OUTPUT_TOKENS_MIN)
        self.eos_id = tokenizer.eos_id
        self.spaced, self.plain = _words(tokenizer, _SPACED), _words(tokenizer, _PLAIN)

    def continuation(self, prompt: Sequence[int]) -> Continuation:
        """The continuation of ``prompt`` (not empty), including its natural length."""
        return Continuation(self, prompt)

    def hashed(self, ids: array[int]) -> xxhash.xxh3_64:
        return xxhash.xxh3_64(ids.tobytes(), seed=self._seed)

    def length(self, prompt: array[int]) -> int:
        """Natural length of the answer to a prompt, in tokens."""
        spread = self._natural_tokens_max - _OUTPUT_TOKENS_MIN + 1
        return _OUTPUT_TOKENS_MIN + self.hashed(prompt).intdigest() % spread

    def unit(self, hash_before: int, last: int) -> tuple[int, ...]:
        """The word or character that follows ids with this hash, of which ``last`` is the last one."""
        if self._characters and not (hash_before >> 32) % _CHARACTER_EVERY:
            return self._characters[hash_before % len(self._characters)]
        words = self.plain if self._ends_bare(last) else self.spaced
        return (words[hash_before % len(words)],)

    def begun(self, ids: array[int]) -> tuple[int, tuple[int, ...]]:
        """Where the answer begins whose beginning these ids end with, and the rest of its last character."""
        begin = len(ids)
        rest: tuple[int, ...] = ()
        for inside in range(1, min(self._unit_tokens[-1], len(ids))):
            unit = self._unit_at(ids, len(ids) - inside)
            if len(unit) > inside and unit[:inside] == tuple(ids[-inside:]):
                begin, rest = len(ids) - inside, unit[inside:]
        while sizes := [
            size
            for size in self._unit_tokens
            if size < begin and self._unit_at(ids, begin - size) == tuple(ids[begin - size : begin])
        ]:
            begin -= sizes[0]
        return begin, rest

    def _unit_at(self, ids: array[int], place: int) -> tuple[int, ...]:
        return self.unit(self.hashed(ids[:place]).intdigest(), ids[place - 1])

    def _ends_bare(self, token_id: int) -> bool:
        bare = self._bare.get(token_id)
        if bare is None:
            special = token_id in self._tokenizer.special_ids
            bare = self._bare[token_id] = special or self._tokenizer.decode([token_id])[-1:].isspace()
        return bare

    def wrong(self) -> WrongContinuation:
        token_ids = self._tokenizer.encode(_WRONG_ANSWER, add_special_tokens=False)
        return WrongContinuation(token_ids, self.eos_id)


@lru_cache(maxsize=8)
def _words(tokenizer: ChatTokenizer, pattern: re.Pattern[str]) -> list[int]:
    """The usable entries of a vocabulary, shared by all engines with this tokenizer."""
    chosen = [
        token_id
        for word, token_id in tokenizer.vocabulary().items()
        if pattern.fullmatch(word) and _round_trips(tokenizer, token_id)
    ]
    if not chosen:
        raise ValueError("the tokenizer has no whole-word entries to generate text from")
    return sorted(chosen)


@lru_cache(maxsize=8)
def _characters(tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    """Tokens of characters that the vocabulary does not have."""
    tokens = (tuple(tokenizer.encode(one, add_special_tokens=False)) for one in _CHARACTERS)
    return [one for one in tokens if len(one) > 1]


def _round_trips(tokenizer: ChatTokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id])
    return tokenizer.encode(text, add_special_tokens=False) == [token_id]


# About a millisecond of tokenizing; a thread hop costs a tenth of that.
_INLINE_CHARS_MAX = 4096


_TOOL_RESULT = " result of the tool. "


class Prepared(msgspec.Struct, frozen=True):
    """A checked generation: its prompt and its limits."""

    token_ids: list[int]
    max_tokens: int
    ignore_eos: bool
    extras: PromptExtras
    min_tokens: int = 0
    stop: Sequence[str] = ()
    n: int = 1
    transfer: TransferParams | None = None
    priority: int = 0
    session_id: str | None = None


def _cache_config(settings: EngineSettings) -> stats.CacheConfig:
    groups = resolve_groups(settings)
    sizes = {group.block_size for group in groups if group.family is Family.FULL}
    states = {group.block_size for group in groups if group.family is Family.MAMBA}
    ranks = settings.decode_context_parallel_size
    return stats.CacheConfig(
        block_size=min(g.block_size // (ranks if g.family is Family.FULL else 1) for g in groups),
        num_gpu_blocks=settings.num_blocks,
        prefix_caching_hash_algo=settings.hash_algo,
        prefix_cache_retention_interval=settings.retention_interval,
        mamba_cache_mode=next((g.mamba_cache_mode for g in groups if g.mamba_cache_mode), "none"),
        mamba_block_size=max(states, default=None),
        effective_attention_block_size=sizes.pop() if len(sizes) == 1 else None,
    )


class EngineModel:
    """Prompts and answers of one model."""

    def __init__(self, settings: EngineSettings, max_model_len: int) -> None:
        self.name = settings.model
        self.root = settings.root or settings.model
        self.rust = settings.frontend == "rust"
        self.owner = "sglang" if settings.kind == "sglang" else "vllm-frontend-rs" if self.rust else "vllm"
        self.max_model_len = max_model_len
        self.version = settings.version
        self.release = release(settings.version)
        self._dp_rank = settings.dp_rank
        self._cache = _cache_config(settings)
        self._started_s = time.time()
        self._drafts = any(group.is_eagle for group in resolve_groups(settings))
        self._turn = asyncio.Lock()
        self._tokenizer = shared_tokenizer(settings.tokenizer_dir)
        self._source = TextSource(
            self._tokenizer,
            seed=settings.seed,
            natural_tokens_max=settings.natural_output_tokens_max,
            characters=settings.characters == "mixed",
        )

    async def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Check and tokenize a chat request. Raises ``EngineError``."""
        self._check_model(request.model)
        request.check()
        token_ids = await self._chat_tokens(request)
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        return self._prepared(request, token_ids, limit)

    async def prepare_completion(self, request: CompletionRequest) -> list[Prepared]:
        """Check and tokenize a completion request, prompt by prompt. Raises ``EngineError``."""
        self._check_model(request.model)
        request.check()
        limit = COMPLETION_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens
        prepared = []
        for prompt in request.prompts():
            if isinstance(prompt, str):
                token_ids = await self._encode(prompt, add_special_tokens=request.add_special_tokens)
            else:
                token_ids = prompt
                self._check_vocabulary(token_ids)
            prepared.append(self._prepared(request, token_ids, limit))
        return prepared

    def sim_requests(self, request_id: str, prepared: list[Prepared]) -> list[SimRequest]:
        """Make the scheduler's requests, one for each choice."""
        # All prompts of a request have the same transfer parameters
        # (vllm/entrypoints/openai/completion/serving.py, 0.32).
        if len(prepared) == prepared[0].n == 1:
            return [self.sim_request(request_id, prepared[0])]
        names = [
            (one, f"{index}_{request_id}-{place}")
            for place, one in enumerate(prepared)
            for index in range(one.n)
        ]
        return [self.sim_request(name, one) for one, name in names]

    def next_turn(
        self, request: SimRequest, prepared: Prepared, transfer: TransferParams | None
    ) -> SimRequest:
        """The request after a tool that the engine runs: the answer so far, then the tool's result."""
        # It has the sampling parameters of the first turn, including ``transfer``
        # (vllm/entrypoints/openai/responses/serving.py, 0.32).
        result = self._tokenizer.encode(_TOOL_RESULT, add_special_tokens=False)
        token_ids = [*prepared.token_ids, *request.output, *result]
        longer = msgspec.structs.replace(prepared, token_ids=token_ids, transfer=transfer)
        return self.sim_request(f"{request.request_id}-2", longer)

    def sim_request(self, request_id: str, prepared: Prepared) -> SimRequest:
        """Make the scheduler's request of one choice."""
        return SimRequest(
            request_id,
            prepared.token_ids,
            self._source.continuation(prepared.token_ids),
            max_tokens=prepared.max_tokens,
            eos_id=self._tokenizer.eos_id,
            extras=prepared.extras,
            ignore_eos=prepared.ignore_eos,
            min_tokens=prepared.min_tokens,
            text=self._tokenizer.answer(prepared.token_ids, prepared.stop, prepared.min_tokens),
            transfer=prepared.transfer,
            priority=prepared.priority,
            session_id=prepared.session_id,
        )

    def text(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """Text of an answer with these tokens."""
        text = self._tokenizer.answer(prompt)
        for token_id in output:
            text.add(token_id)
        return text.whole

    def expected(self, prepared: Prepared) -> tuple[list[int], str]:
        """The whole answer to a request up to its limits: its tokens without the end-of-text token, and its
        text."""
        words, output = self._source.continuation(prepared.token_ids), []
        text = self._tokenizer.answer(prepared.token_ids, prepared.stop, prepared.min_tokens)
        for index in range(prepared.max_tokens):
            token = words.token(index, ignore_eos=prepared.ignore_eos or index < prepared.min_tokens)
            if token == self._source.eos_id:
                break
            output.append(token)
            if text.add(token):
                break
        return output, text.whole

    def wrong_answer(self) -> Sampler:
        """Sampler for a request whose blocks hold another prompt's KV."""
        return self._source.wrong()

    async def tokenize(self, request: TokenizeChatRequest | TokenizeTextRequest) -> list[int]:
        """Token ids for POST /tokenize. Raises ``EngineError``."""
        self._check_model(request.model)
        if isinstance(request, TokenizeChatRequest):
            return await self._chat_tokens(request)
        return await self._encode(request.prompt, add_special_tokens=request.add_special_tokens)

    def detokenize(self, request: DetokenizeRequest) -> str:
        """Text for POST /detokenize; ids outside the vocabulary have no text. Raises ``EngineError``."""
        self._check_model(request.model)
        return self._tokenizer.decode(request.tokens)

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return self._tokenizer.token_strings(token_ids)

    def metrics(
        self,
        counted: stats.EngineStats,
        gauges: stats.Gauges,
        transfers: TransferStats | None,
        only: Collection[str] = (),
    ) -> bytes:
        if self.owner == "sglang":
            return stats.render_sglang(gauges, self._cache, model=self.name, dp_rank=self._dp_rank)
        return stats.render(
            counted,
            gauges,
            self._cache,
            model=self.name,
            dp_rank=self._dp_rank,
            transfers=transfers,
            drafts=self._drafts,
            started_s=self._started_s,
            only=only,
        )

    async def _chat_tokens(self, request: ChatRequest) -> list[int]:
        request.check_template()
        try:
            text = self._tokenizer.render(
                request.messages,
                tools=request.tools,
                documents=request.documents,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                rust=self.rust,
            )
        except TemplateError as error:
            raise invalid(str(error)) from None
        return await self._encode(text, add_special_tokens=request.add_special_tokens)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # In order of arrival: by default vLLM has one renderer thread.
        async with self._turn:
            if len(text) <= _INLINE_CHARS_MAX:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(
                self._tokenizer.encode, text, add_special_tokens=add_special_tokens
            )

    def _prepared(
        self, request: ChatRequest | CompletionRequest, token_ids: list[int], limit: int | None
    ) -> Prepared:
        if not token_ids:
            raise invalid("The decoder prompt cannot be empty")
        room = self.max_model_len - len(token_ids)
        if room < 0:
            raise prompt_too_long(len(token_ids), self.max_model_len)
        max_tokens = room if limit is None else min(limit, room)
        if max_tokens < 1:
            text = f"max_tokens must be at least 1, got {max_tokens}."
            raise invalid(text, param="max_tokens", value=max_tokens)
        if request.min_tokens > max_tokens:
            text = f"min_tokens must be less than or equal to max_tokens={max_tokens}"
            raise invalid(f"{text}, got {request.min_tokens}.", param="min_tokens", value=request.min_tokens)
        return Prepared(
            token_ids=token_ids,
            max_tokens=max_tokens,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            stop=request.stop_strings,
            extras=PromptExtras(cache_salt=request.cache_salt),
            n=request.n or 1,
            transfer=None if request.use_beam_search else request.kv_transfer_params,
            priority=request.priority,
            session_id=request.session_id,
        )

    def _check_model(self, name: str | None) -> None:
        if name and name != self.name:
            raise unknown_model(name, self.name)

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._tokenizer.vocab_size:
            raise invalid(f"Token id {highest} is out of vocabulary")
