"""From a request to its placement key: exact tokens and block hashes, or text affinity.

The order is fixed: computed here, if a tokenizer is configured and the prompt is of a kind that can be
reproduced exactly; else by a render server, else by an engine's own endpoint, within a time budget; else by
affinity of the text. Nothing is guessed: each step is exact or is skipped, and counted with the reason.

Bodies above ``prompt_bytes_max``, and those of too many values, are not decoded: their first bytes represent
their text.

Event-loop thread only; long work goes to worker threads. No engine is called if the first step succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from kvatlas.publisher.block_hash import HashScheme, PromptExtras
from kvatlas.publisher.events import BlockHash
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.body import peek
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.asked_counts import answer_tokens, answers_beside, num_answers, num_prompts
from kvatlas.router.prompts.asking import Asking, EngineUrl
from kvatlas.router.prompts.bodies import Converted, Parsed, decode_body, pieces_of, prompt_field
from kvatlas.router.prompts.chat.anthropic import MessagesBody
from kvatlas.router.prompts.chat.conversions import Conversions, InlineConversions, Memory, TooManyValuesError
from kvatlas.router.prompts.conversation import Turn
from kvatlas.router.prompts.families.base import is_unlike_sglang
from kvatlas.router.prompts.images import MediaMemory
from kvatlas.router.prompts.local_model import LocalModel
from kvatlas.router.prompts.model_dir import ModelDirError, load_model_dir
from kvatlas.router.prompts.model_names import ModelNames, ModelTarget
from kvatlas.router.prompts.prompt import Prompt, TextAffinity, affinity_keys, raw_piece
from kvatlas.router.prompts.prompt_cache import PrefixCache, cached_ids
from kvatlas.router.prompts.remote import EngineSide, EngineTokens, Post, placed_items
from kvatlas.router.prompts.render_servers import Renderers
from kvatlas.router.prompts.request import (
    INLINE_BYTES_MAX,
    INLINE_VALUES_MAX,
    NO_REST,
    VALUES_MAX,
    BatchBody,
    ChatBody,
    CompletionBody,
    GenerateBody,
    NotLocalError,
    decode_prompt,
    first_prompt,
    has_many_values,
    rest_of,
)
from kvatlas.router.prompts.settings import ModelPrompts, PromptSettings, PromptStats
from kvatlas.router.prompts.shared_prompts import SharedPrompts
from kvatlas.router.prompts.shared_records import SharedRecords
from kvatlas.router.prompts.truncation import ids_of, truncated
from kvatlas.router.prompts.worker_threads import Workers

__all__ = [
    "LocalModel",
    "ModelDirError",
    "ModelPrompts",
    "Prompt",
    "PromptReader",
    "PromptSettings",
    "ReadHere",
    "TextAffinity",
]

# More new blocks than this are hashed in a worker thread; fewer take under 3 ms of the event loop.
INLINE_BLOCKS_MAX = 1024
# Prompts that wait for a worker thread; further ones are placed by text affinity, which beats waiting.
WORKER_QUEUE_LEN_MAX = 64
# Of image tokens learned from engines and render servers, all models together; about 4 KB per image.
MEDIA_CACHE_BYTES_MAX = 16 << 20
# Reasons for which asking an engine cannot help, or would only load it.
_HOPELESS = frozenset({"model_unknown", "lora_path_unknown", "busy", "embeds", "empty", "earlier_response"})
_ENCODER = msgspec.json.Encoder()

_Result = TypeVar("_Result")


class _UnknownImagesError(NotLocalError):
    """Everything but the tokens of the images is known: the prompt with marks for them."""

    def __init__(self, turn: Turn) -> None:
        super().__init__("multimodal")
        self.turn = turn


class ReadHere(NamedTuple):
    """A prompt that was made here, and its request."""

    model: str
    path: str
    body: bytes
    ids: Sequence[int]


class PromptReader:
    """Reads requests. ``models`` by served name (``*``: any other); ``post`` calls engines, with the client's
    own ``Authorization`` or with none.

    ``engine_url`` names an engine that serves a model behind a frontend (None: there is none), ``frontends``
    those of its engines, ``is_adapter`` tells LoRA names, ``records`` makes those that workers share. Loading
    happens here and takes up to seconds per tokenizer. Raises ``ModelDirError`` for an unusable directory.
    """

    def __init__(
        self,
        models: Mapping[str, ModelPrompts],
        settings: PromptSettings,
        post: Post,
        *,
        engine_url: EngineUrl = lambda _model, _frontend: None,
        frontends: Callable[[str | None], tuple[Frontend, ...]] = lambda _model: ("python",),
        is_adapter: Callable[[str], bool] = lambda _model: False,
        clock: Callable[[], float] = time.monotonic,
        stats: PromptStats | None = None,
        records: Callable[[PromptStats], SharedRecords | None] = lambda _stats: None,
    ) -> None:
        self.stats = stats or PromptStats()
        self._settings = settings
        self.renderers = Renderers(
            settings.renderers, EngineSide(post, settings, self.stats, clock, who="renderer")
        )
        self._asking = Asking(self.renderers, EngineSide(post, settings, self.stats, clock), engine_url)
        self._workers = Workers(
            self.stats, threads=settings.worker_threads, queue_len_max=WORKER_QUEUE_LEN_MAX
        )
        shared = records(self.stats)
        self._cache = PrefixCache(
            self.stats,
            settings.prefix_cache_bytes_max,
            None if shared is None else SharedPrompts(shared, self.stats),
        )
        self._conversions = Conversions()
        self._media = MediaMemory(self.stats, MEDIA_CACHE_BYTES_MAX)
        self._frontends = frontends
        self._is_adapter = is_adapter
        self._names = ModelNames(models, is_adapter)
        self._loaded = {
            name: self.load(config) for name, config in models.items() if config.tokenizer_dir is not None
        }
        self._models = dict(models)
        self._found: dict[str, tuple[ModelPrompts, LocalModel]] = {}
        self._watched: dict[str, tuple[int, Callable[[ReadHere], None]]] = {}
        self._local = dict(self._loaded)

    def load(self, config: ModelPrompts) -> LocalModel:
        """Load a model's tokenizer and templates, in any thread. Raises ``ModelDirError``."""
        try:
            return LocalModel(
                config,
                load_model_dir(config.tokenizer_dir or ""),
                stats=self.stats,
                cache=self._cache,
                workers=self._workers,
                settings=self._settings,
            )
        except ModelDirError:
            raise
        except ValueError as error:
            raise ModelDirError(f"{config.tokenizer_dir}: {error}") from None

    async def set_models(self, models: Mapping[str, ModelPrompts]) -> None:
        """Replace all models; unchanged ones keep their caches, the others are loaded in a thread."""
        local: dict[str, LocalModel] = {}
        for name, config in models.items():
            if config.tokenizer_dir is None:
                continue
            if name in self._loaded and self._models.get(name) == config:
                local[name] = self._loaded[name]
            else:
                local[name] = await asyncio.to_thread(self.load, config)
        for name, model in self._loaded.items():
            if local.get(name) is not model:
                model.clear()
        self._models, self._loaded = dict(models), local
        self._combine()

    def use(self, name: str, found: tuple[ModelPrompts, LocalModel] | None) -> None:
        """Use the found tokenizer for a served model; None: as configured."""
        before = self._found.pop(name, None)
        self._watched.pop(name, None)
        if before is not None:
            before[1].clear()
        if found is not None:
            self._found[name] = found
        self._combine()

    def watch(self, name: str, prompts: int, shown_to: Callable[[ReadHere], None]) -> None:
        """Report the next prompts of a served model that are made here, until its reader changes."""
        self._watched[name] = prompts, shown_to

    def _combine(self) -> None:
        found = {name: config for name, (config, _) in self._found.items()}
        self._names = ModelNames(self._models | found, self._is_adapter)
        self._local = self._loaded | {name: local for name, (_, local) in self._found.items()}

    def close(self) -> None:
        """Stop the worker threads."""
        self._workers.close()

    def local_model(self, name: str) -> LocalModel | None:
        """The loaded tokenizer and templates of a configured model, for ``doctor`` and tests."""
        return self._local.get(name)

    def local_of(self, model: str) -> LocalModel | None:
        """The local reader of a model or adapter name; None: an engine reads its prompts."""
        try:
            return self._local.get(self._names.target(model).name)
        except NotLocalError:
            return None

    def tokenized_by(self, model: str) -> str | None:
        """The library that tokenizes this model's prompts, and why not a faster one; None: an engine does."""
        local = self.local_of(model)
        return None if local is None else local.library_names(chat=True)

    def tokenizers(self, models: Iterable[str]) -> dict[str, str]:
        """The library of each of these models whose prompts are tokenized here."""
        libraries = {model: self.tokenized_by(model) for model in models}
        return {model: library for model, library in libraries.items() if library is not None}

    async def read(
        self, request: InboundRequest, frontends: tuple[Frontend, ...] = ()
    ) -> Prompt | TextAffinity:
        """Read a request; ``frontends``: of the engines that may get it, if known.

        Raises ``ApiError`` 400 for a body that no engine would accept.
        """
        path = request.path.rstrip("/")
        if len(request.body) > self._settings.prompt_bytes_max:
            return self._read_beginning(request, path, "too_large")
        if len(request.body) > 2 * VALUES_MAX and has_many_values(request.body, VALUES_MAX):
            self._check_json(request.body)
            return self._read_beginning(request, path, "too_complex")
        parsed: Parsed | None = None
        frontends = frontends or self._frontends(request.model) or ("python",)
        try:
            try:
                parsed, request.prompt = request.prompt or decode_body(path, request.body), None
                prompt = await self._read_local(request, path, parsed, frontends[0])
                if len(frontends) > 1:
                    await self._add_variants(prompt, request, path, parsed, frontends[1:])
            except NotLocalError as miss:
                if miss.reason == "too_complex":
                    return self._read_beginning(request, path, miss.reason)
                self.stats.not_local[miss.reason] += 1
                marked = miss.turn if isinstance(miss, _UnknownImagesError) else None
                return await self._read_elsewhere(request, path, parsed, miss.reason, marked, frontends)
        except ApiError:
            self.stats.refused += 1
            raise
        self.stats.local += 1
        self.stats.count_read(path, "local")
        if self._watched:
            self._show(request, path, prompt)
        return prompt

    async def _add_variants(
        self,
        prompt: Prompt,
        request: InboundRequest,
        path: str,
        parsed: Parsed | None,
        frontends: Sequence[Frontend],
    ) -> None:
        """Add the tokens of other frontends, made here or by SGLang; without them a frontend's engines are
        predicted to hold nothing."""
        if not frontends:
            return
        prompt.variants = {prompt.frontend: prompt}
        for frontend in frontends:
            other: Prompt | None = None
            try:
                if parsed is not None:
                    other = await self._read_local(request, path, parsed, frontend)
            except NotLocalError as miss:
                self.stats.not_local[miss.reason] += 1
                if frontend == "sglang" and miss.reason not in _HOPELESS:
                    other = await self._ask_engines(request, path, parsed, None, frontend)
            if other is not None:
                other.variants = prompt.variants
                prompt.variants[frontend] = other

    def _show(self, request: InboundRequest, path: str, prompt: Prompt) -> None:
        name = self._names.target(request.model).name
        if request.model is not None and request.model in self._watched:
            name = request.model  # read as those of ``*``
        left, shown_to = self._watched.get(name, (0, None))
        if shown_to is None:
            return
        shown_to(ReadHere(name, path, request.body, prompt.token_ids))
        self._watched[name] = left - 1, shown_to
        if left <= 1:
            del self._watched[name]

    async def hashes(self, prompt: Prompt, scheme: HashScheme) -> Sequence[BlockHash]:
        """``prompt.hashes(scheme)``, in a worker thread if many blocks are new."""
        if (
            prompt.num_tokens > INLINE_BLOCKS_MAX * scheme.hash_block_size
            and prompt.num_new_blocks(scheme) > INLINE_BLOCKS_MAX
        ):
            try:
                chain = prompt.forked_chain(scheme)
                ids = prompt.token_ids
                await self._workers.run(lambda: chain.extend(ids))
                prompt.adopt(chain)
            except NotLocalError:
                # The queue is full: better late than wrong.
                await asyncio.sleep(0)
        return prompt.hashes(scheme)

    def _check_json(self, body: bytes) -> None:
        try:
            peek(body)
        except ApiError:
            self.stats.refused += 1
            raise

    def _read_beginning(self, request: InboundRequest, path: str, reason: str) -> TextAffinity:
        self.stats.not_local[reason] += 1
        self._count_affinity(path, reason)
        piece = raw_piece(request.body, prompt_field(path))
        keys = affinity_keys([piece], _affinity_scope(request, None))
        return TextAffinity(keys, reason, num_answers=answers_beside(request.body))

    async def _read_local(
        self, request: InboundRequest, path: str, parsed: Parsed, frontend: Frontend = "python"
    ) -> Prompt:
        target = self._names.target(request.model)
        extras = target.unsalted if parsed.cache_salt is None else target.extras(parsed.cache_salt)
        scope = target.unsalted_scope if extras is target.unsalted else target.scope(extras)
        # Only the new part of a plain chat is decoded: its cost is checked where it is known
        # (``local_model.py``).
        plain = isinstance(parsed, ChatBody) and parsed.chat_template_kwargs is parsed.documents is None
        long = len(request.body) > INLINE_BYTES_MAX if plain else _takes_long(request.body, parsed)
        if frontend == "sglang" and is_unlike_sglang(request.body):
            raise NotLocalError("frontend")
        local = self._local.get(target.name)
        if local is None or isinstance(parsed, GenerateBody):
            return await self._read_tokens(target, extras, parsed, frontend, long=long)
        if frontend != "python":
            local = local.behind(frontend)
        family = local.renderer.family
        if family is not None and not local.renderer.reads(path):
            # the engine has separate code for this API, which is not reproduced
            raise NotLocalError("renderer")
        rest = NO_REST
        if isinstance(parsed, ChatBody):
            turn = await local.chat(parsed, extras, scope, long=long)
        elif isinstance(parsed, CompletionBody):
            first, rest = await self._done(long, lambda: first_prompt(decode_prompt(parsed.prompt)))
            turn = await local.completion(parsed, first, extras, scope)
            rest = rest.in_tokens(turn.num_tokens, len(first)).cut(parsed.truncate_prompt_tokens)
        elif isinstance(parsed, BatchBody):
            turn = await local.chat(parsed.first(), extras, scope, long=long)
            sizes = parsed.sizes()
            rest = rest_of(sizes[1:], given=False).in_tokens(turn.num_tokens, sizes[0])
            rest = rest.cut(parsed.truncate_prompt_tokens)
        else:
            chat, long = await self._converted(parsed, local, long=long)
            turn = await local.chat(chat, extras, scope, long=long)
        is_chat = not isinstance(parsed, CompletionBody)
        by = local.tokenizer.name if family is None else local.library_names(chat=is_chat)
        if turn.media:
            found = self._media.expanded(target.name, turn.media, turn.ids)
            if found is None or rest.prompts:
                raise _UnknownImagesError(turn)
            return self._prompt_of(found, target, extras, parsed, source="local", by=by)
        self.stats.multi_prompt += rest.prompts > 0
        least, most = answer_tokens(parsed)
        answers = num_answers(parsed)
        return Prompt(
            turn, self.stats, "local", by, rest, parsed.skips_cache(), most, least, answers, frontend
        )

    async def _read_tokens(
        self, target: ModelTarget, extras: PromptExtras, parsed: Parsed, frontend: Frontend, *, long: bool
    ) -> Prompt:
        """Read a prompt that the request gives as tokens, for which no tokenizer is needed."""
        if isinstance(parsed, GenerateBody):
            given = await self._done(long, lambda: _given_tokens(parsed))
        elif isinstance(parsed, CompletionBody):
            given = await self._done(long, lambda: _completion_tokens(parsed))
        else:
            raise NotLocalError("no_tokenizer")
        prompt = self._prompt_of(given, target, extras, parsed, source="local", by="the request")
        prompt.frontend = frontend
        return prompt

    async def _converted(self, parsed: Converted, local: LocalModel, *, long: bool) -> tuple[ChatBody, bool]:
        """Convert a body to its chat; also whether that took a worker thread, or would have blocked the
        loop."""

        def convert(memory: Memory) -> ChatBody:
            return parsed.as_chat(memory, lambda: local.renderer.traits)

        if not long:
            try:
                return convert(InlineConversions(self._conversions, INLINE_VALUES_MAX)), False
            except TooManyValuesError:
                pass
        return await self._workers.run(lambda: convert(self._conversions)), True

    async def _done(self, long: bool, job: Callable[[], _Result]) -> _Result:
        """Return the job's result; long jobs run in a worker thread."""
        return await self._workers.run(job) if long else job()

    async def _read_elsewhere(
        self,
        request: InboundRequest,
        path: str,
        parsed: Parsed | None,
        reason: str,
        marked: Turn | None,
        frontends: tuple[Frontend, ...],
    ) -> Prompt | TextAffinity:
        prompt = None
        if reason not in _HOPELESS:
            prompt = await self._ask_engines(request, path, parsed, marked, frontends[0])
        if prompt is not None:
            await self._add_variants(prompt, request, path, parsed, frontends[1:])
            self.stats.renderer += prompt.source == "renderer"
            self.stats.engine += prompt.source == "engine"
            self.stats.count_read(path, prompt.source)
            return prompt
        pieces = iter((request.body,)) if parsed is None else pieces_of(parsed)
        keys = affinity_keys(pieces, _affinity_scope(request, parsed))
        self._count_affinity(path, reason)
        prompts, answers = (1, 1) if parsed is None else (num_prompts(parsed), num_answers(parsed))
        return TextAffinity(keys, reason, prompts, answers)

    def _count_affinity(self, path: str, reason: str) -> None:
        self.stats.affinity[reason] += 1
        self.stats.count_read(path, "affinity")

    async def _ask_engines(
        self,
        request: InboundRequest,
        path: str,
        parsed: Parsed | None,
        marked: Turn | None,
        frontend: Frontend,
    ) -> Prompt | None:
        """Ask a render server or an engine for the prompt."""
        try:
            target = self._names.target(request.model)
            extras = target.extras(None if parsed is None else parsed.cache_salt)
        except NotLocalError:
            return None
        answer = await self._asking.tokens(request, path, parsed, frontend)
        if answer is None:
            return None
        found, source, by = answer
        if marked is not None and not found.rest.prompts:
            self._media.learn(target.name, marked.media, marked.ids, found)
        try:
            prompt = self._prompt_of(found, target, extras, parsed, source=source, by=by)
        except NotLocalError:
            return None
        prompt.frontend = frontend
        return prompt

    def _prompt_of(
        self,
        found: EngineTokens,
        target: ModelTarget,
        extras: PromptExtras,
        parsed: Parsed | None,
        *,
        source: Literal["local", "renderer", "engine"],
        by: str,
    ) -> Prompt:
        # With an adapter the engine may put its name into item identifiers: depends on its flags.
        if found.multimodal and target.lora_name is not None:
            raise NotLocalError("multimodal")
        extras = msgspec.structs.replace(extras, multimodal=found.multimodal)
        turn = cached_ids(self._cache, self.stats, found.ids, extras, target.scope(extras))
        self.stats.multi_prompt += found.rest.prompts > 0
        least, most = (1, 0) if parsed is None else answer_tokens(parsed)
        return Prompt(
            turn,
            self.stats,
            source=source,
            by=by,
            rest=found.rest,
            skips_cache=parsed is not None and parsed.skips_cache(),
            answer_tokens_max=most,
            answer_tokens_min=least,
            num_answers=1 if parsed is None else num_answers(parsed),
        )


def _takes_long(body: bytes, parsed: Parsed) -> bool:
    """Whether decoding the whole body would block the event loop."""
    if len(body) > INLINE_BYTES_MAX:
        return True
    # Of a plain Messages request too only the new part is decoded (``_converted``).
    if isinstance(parsed, MessagesBody) and parsed.chat_template_kwargs is None:
        return parsed.num_pieces() > INLINE_VALUES_MAX
    return has_many_values(body, INLINE_VALUES_MAX)


def _affinity_scope(request: InboundRequest, parsed: Parsed | None) -> bytes:
    salt = parsed.cache_salt if parsed is not None and isinstance(parsed.cache_salt, str) else None
    return _ENCODER.encode([request.model, salt])


def _completion_tokens(body: CompletionBody) -> EngineTokens:
    """The first prompt of a completion whose prompts are token ids, which needs no tokenizer."""
    if body.prompt_embeds is not None:
        raise NotLocalError("embeds")
    if body.suffix is not None:
        raise NotLocalError("field")
    if not bytes(body.prompt).lstrip().startswith(b"["):
        raise NotLocalError("no_tokenizer")
    first, rest = first_prompt(decode_prompt(body.prompt))
    if isinstance(first, str):
        raise NotLocalError("no_tokenizer")
    ids = truncated(ids_of(first), body, max_model_len=None, from_text=False)
    return EngineTokens(ids, rest=rest.cut(body.truncate_prompt_tokens))


def _given_tokens(body: GenerateBody) -> EngineTokens:
    """The prompt of a request that brings its tokens, and the places of its multimodal items."""
    if body.content_parts:
        raise NotLocalError("multimodal")
    return EngineTokens(ids_of(body.token_ids), placed_items(body.features))
