"""One model's prompts computed here: chat template, tokenizer, and a cache of what was computed before.

A next turn finds its conversation by the raw bytes of its messages, decodes only the new ones, renders the
whole text (cheap), compares it with the former text up to the last cut that agrees, and tokenizes only
what follows. ``template`` and ``tokenizer`` say why the result is equal to computing all of it.

Measured by ``python -m benchmarks.prompts`` (microseconds of CPU on a busy shared core, hashing included,
DeepSeek V3's vocabulary, fastokens / ``tokenizers``): 1 KB cold 115 / 900, 32 KB 2,200 / 18,000, 400 KB
14,000 / 185,000; next turn of 140 new characters 86, 180 and 1,900 / 170, 300 and 2,300; exact repeat 8-240.

Always true: the result is what the engine computes, or ``NotLocalError`` is raised. Work on more than
``inline_chars_max`` new characters runs in a worker thread.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, Final, cast

import msgspec

from publisher.block_hash import PromptExtras
from router.prompts.cache import Entry, PrefixCache, cached_ids, common_tokens, message_keys
from router.prompts.chat.anthropic import disabled_effort, wants_system_first
from router.prompts.chat.compiled import TemplateRejectsError
from router.prompts.chat.context import ChatContext, ContextCache, chat_context, context_key, parse_tools
from router.prompts.chat.conversions import TemplateTraits
from router.prompts.chat.messages import Message, parse_message, without_developer_role
from router.prompts.chat.template import ChatTemplate, continue_final, message_shape
from router.prompts.config import ModelPrompts, PromptSettings
from router.prompts.families.base import Family, TextTokenizer, family_of
from router.prompts.families.missing import MissingFamily
from router.prompts.model_dir import ModelDir, ModelDirError, load_chat_template
from router.prompts.request import (
    ChatBody,
    CompletionBody,
    NotLocalError,
    decode_message,
)
from router.prompts.sizes import compact, kept_bytes, num_values
from router.prompts.stats import PromptStats
from router.prompts.tokens.ids import Ids
from router.prompts.tokens.tokenizer import PromptTokenizer
from router.prompts.tokens.truncation import ids_of, truncated
from router.prompts.workers import Workers

_INLINE_MESSAGES: Final = 128
"""New messages take about 15 us each to decode, check and render: 2 ms for so many."""
_MESSAGES_MAX: Final = 8192
"""Finding and keeping a conversation takes about 1 us per message, all of it on the event loop."""
_TOOL_VALUES_MAX: Final = 10_000
"""Writing more of them as JSON is one call that holds the interpreter for 10 ms."""
_FASTER: Final = 4
"""fastokens takes so many times the text inline: 0.7 ms for 16 KB of prose, 7 ms for the worst text."""
_LOOKED_BACK: Final = 8
_ENCODER: Final = msgspec.json.Encoder()


class _Rendered(msgspec.Struct):
    """A chat on its way to tokens."""

    conversation: list[Message]
    weights: list[int]
    images: list[tuple[bytes, ...]]
    shapes: frozenset[int]
    text: str | list[int]
    """Ids where the model's family makes them itself."""


class LocalModel:
    """Templates, tokenizer and caches of one model; event-loop thread only."""

    def __init__(
        self,
        config: ModelPrompts,
        directory: ModelDir,
        *,
        stats: PromptStats,
        cache: PrefixCache,
        workers: Workers,
        settings: PromptSettings,
    ) -> None:
        self._config = config
        self._stats = stats
        self._cache = cache
        self._workers = workers
        self._settings = settings
        self._renderer = directory.renderer if config.tokenizer_mode == "auto" else config.tokenizer_mode
        self.family = family_of(self._renderer, directory.folder, config.chat_template)
        self._special_tokens = directory.special_tokens if self.family is None else {}
        self._format = config.chat_template_content_format
        takes_defaults = self.family is None or self.family.takes_defaults
        self._defaults = config.default_chat_template_kwargs if takes_defaults else {}
        self.tokenizer = self._load_tokenizer(directory)
        self.templates = self._load_templates(directory)
        self._contexts = ContextCache(stats, settings.context_cache_bytes_max)

    def _load_tokenizer(self, directory: ModelDir) -> TextTokenizer:
        if directory.tokenizer is not None:
            fast = self._settings.fast_tokenizer == "auto"
            return PromptTokenizer(directory.tokenizer, self._stats, fast=fast)
        if isinstance(self.family, MissingFamily):
            raise ModelDirError(self.family.name)
        if self._renderer == "cohere":
            raise ModelDirError(f"{directory.folder}: no tokenizer.json, which tokenizer_mode = cohere takes")
        return cast("TextTokenizer", self.family)  # Mistral's, which does both

    def _load_templates(self, directory: ModelDir) -> dict[bool, ChatTemplate | None]:
        """By whether the chat has tools; one object where both have the same template."""
        loaded: dict[str, ChatTemplate] = {}
        templates: dict[bool, ChatTemplate | None] = {False: None, True: None}
        for with_tools in templates:
            source = self._template_source(directory, with_tools=with_tools)
            if source is None:
                continue
            if source not in loaded:
                loaded[source] = ChatTemplate(source, self._stats, self._special_tokens)
            templates[with_tools] = loaded[source]
        return templates

    def _template_source(self, directory: ModelDir, *, with_tools: bool) -> str | None:
        given = self._config.chat_template
        if given is None:
            return directory.template_for(with_tools=with_tools)
        return directory.templates.get(given) or load_chat_template(given)

    def close(self) -> None:
        """Free the cache of its own: the model is not served any more."""
        self._contexts.clear()

    def by(self, *, chat: bool) -> str:
        """What reads prompts here, for people: the tokenizer's library, and the family's of chats."""
        if self.family is None or not chat or self.family.name == self.tokenizer.name:
            return self.tokenizer.name
        return f"{self.family.name}, {self.tokenizer.name}"

    @property
    def unreadable(self) -> str | None:
        """Why chats of this model are left to others, and what to do about it; None: they are not."""
        if isinstance(self.family, MissingFamily):
            return self.family.name
        if self._renderer != "hf" and self.family is None:
            return f"{self._renderer}: vLLM's own code renders these chats; give a render server (--renderer)"
        return None

    @cached_property
    def traits(self) -> TemplateTraits:
        """What engines find out about the template when they start, or were told; where code renders, about
        the template that they were given, if any."""
        sources = [None if one is None else one.source for one in self.templates.values()]
        if self._renderer not in {"hf", "harmony"} and self._config.chat_template is None:
            sources = [None]
        effort = self._config.anthropic_disabled_thinking_effort
        if effort == "auto":
            effort = disabled_effort(self._short_chat)
        return TemplateTraits(any(map(wants_system_first, sources)), effort, self._renderer == "cohere")

    def _short_chat(self, effort: str) -> str | list[int] | None:
        body = ChatBody(messages=[msgspec.Raw(b'{"role":"user","content":"Hi"}')], reasoning_effort=effort)
        try:
            return self._render([bytes(body.messages[0])], None, 0, *self._context_of(body)).text
        except NotLocalError:
            return None

    async def chat(self, body: ChatBody, extras: PromptExtras, scope: bytes, *, long: bool) -> Entry:
        """The prompt of a chat, images as the template has them; ``long``: made in a thread.

        Raises ``NotLocalError``, ``ApiError`` 400.
        """
        if self.unreadable is not None:
            raise NotLocalError("renderer")
        if isinstance(body.kv_transfer_params, dict) and "prompt_token_ids" in body.kv_transfer_params:
            raise NotLocalError("field")
        if len(body.messages) > _MESSAGES_MAX or num_values(bytes(body.tools)) > _TOOL_VALUES_MAX:
            raise NotLocalError("too_complex")
        template, context = (
            await self._workers.run(lambda: self._context_of(body)) if long else self._context_of(body)
        )
        special = _flag(body.add_special_tokens) and not self.tokenizer.adds_nothing
        limits = _ENCODER.encode(
            (body.truncate_prompt_tokens, body.truncation_side, special, body.orders_tool_calls)
        )
        stamp = b"" if self.family is None else self.family.stamp()
        scope = compact(b"\0".join((scope, context.key, limits, self.tokenizer.name.encode(), stamp)))
        raws = [bytes(raw) for raw in body.messages]
        keys = message_keys(scope, raws)
        parent, shared = self._find(scope, keys, raws)
        if parent is not None and shared == len(raws) == len(parent.raws) and not _by_the_clock(template):
            self._stats.tokens_reused += len(parent.ids)
            return parent

        if parent is not None:
            raws[:shared] = parent.raws[:shared]  # the same objects: memory for new messages only

        def render() -> _Rendered:
            return self._render(raws, parent, shared, template, context, orders_calls=body.orders_tool_calls)

        long = long or len(raws) - shared > _INLINE_MESSAGES
        rendered = await self._workers.run(render) if long else render()
        entry = Entry(
            keys,
            scope,
            ids_of(()),
            extras,
            raws,
            rendered.conversation,
            rendered.weights,
            rendered.images,
            rendered.shapes,
        )
        if entry.media and (special or body.truncate_prompt_tokens is not None or context.continue_final):
            raise NotLocalError("multimodal")
        if isinstance(rendered.text, list):  # the family's own ids, complete
            entry.ids = ids_of(rendered.text)
            return self._keep(entry, parent, 0)
        cuts = None if special or body.truncate_prompt_tokens else parent
        known = await self._tokenize(entry, rendered.text, cuts)
        if special:
            entry.ids = self.tokenizer.with_special_tokens(entry.ids)
        entry.ids = self._truncated(entry.ids, body, special)
        if special or body.truncate_prompt_tokens is not None:
            entry.starts, entry.counts = [], []  # offsets of ids that are no longer there
        return self._keep(entry, parent, known)

    async def completion(
        self, body: CompletionBody, prompt: str | list[int], extras: PromptExtras, scope: bytes
    ) -> Entry:
        """A completion's first prompt. Raises as ``chat`` does."""
        if body.prompt_embeds is not None:
            raise NotLocalError("embeds")
        if body.suffix is not None:
            raise NotLocalError("field")
        if not isinstance(prompt, str):
            ids = truncated(ids_of(prompt), body, max_model_len=self._config.max_model_len, from_text=False)
            return self.entry_of_ids(ids, extras, scope)
        special = _flag(body.add_special_tokens)
        entry = Entry([], scope, ids_of(()), extras)
        await self._tokenize(entry, prompt, None)
        ids = self.tokenizer.with_special_tokens(entry.ids) if special else entry.ids
        return self.entry_of_ids(self._truncated(ids, body, special), extras, scope)

    def entry_of_ids(self, ids: Ids, extras: PromptExtras, scope: bytes) -> Entry:
        """A cached prompt of given ids."""
        return cached_ids(self._cache, self._stats, ids, extras, scope)

    def _context_of(self, body: ChatBody) -> tuple[ChatTemplate | Family, ChatContext]:
        """Template and context; those of plain requests are remembered."""
        if self.family is not None:
            self.family.check(body)
        key = context_key(body)
        known = None if key is None else self._contexts.get(key)
        if known is not None:
            return known
        tools = parse_tools(body, exclude_when_none=self._config.exclude_tools_when_tool_choice_none)
        template = self.family or self.templates[tools is not None]
        if template is None:
            raise NotLocalError("no_template")
        context = chat_context(
            body,
            template,
            tools=tools,
            special_tokens=self._special_tokens,
            defaults=self._defaults,
        )
        if key is not None:
            self._contexts.put(key, template, context)
        return template, context

    def _find(self, scope: bytes, keys: list[int], raws: list[bytes]) -> tuple[Entry | None, int]:
        """The prompt that shares the most leading messages, compared byte by byte."""
        found = self._cache.find(keys)
        if found is None or found[0].scope != scope or found[0].raws[: found[1]] != raws[: found[1]]:
            self._stats.prefix_misses += 1
            return None, 0
        self._stats.prefix_hits += 1
        return found

    def _render(
        self,
        raws: list[bytes],
        parent: Entry | None,
        shared: int,
        template: ChatTemplate | Family,
        context: ChatContext,
        *,
        orders_calls: bool = True,
    ) -> _Rendered:
        """Decode the new messages and render all."""
        conversation = parent.conversation[:shared] if parent is not None else []
        weights = parent.weights[:shared] if parent is not None else []
        images = parent.images[:shared] if parent is not None else []
        shapes = set(parent.shapes) if parent is not None else {context.shape}
        for index in range(shared, len(raws)):
            raw = decode_message(msgspec.Raw(raws[index]), index)
            seen: list[bytes] = []
            message = self._parsed(raw, template, seen, orders_calls=orders_calls)
            images.append(tuple(seen))
            conversation.append(message)
            weights.append(kept_bytes(message) + sys.getsizeof(raws[index]))
            if isinstance(template, ChatTemplate):
                shapes.add(message_shape(message))
        frozen = frozenset(shapes)
        if not conversation:
            raise NotLocalError("template_rejected")
        try:
            text = self._render_all(conversation, frozen, template, context)
        except TemplateRejectsError:
            raise NotLocalError("template_rejected") from None
        return _Rendered(conversation, weights, images, frozen, text)

    def _parsed(
        self, message: Message, template: ChatTemplate | Family, images: list[bytes], *, orders_calls: bool
    ) -> Message:
        if not isinstance(template, ChatTemplate):
            return template.parse(message)
        form = template.content_format if self._format == "auto" else self._format
        return parse_message(message, form, orders_calls=orders_calls, images=images)

    @staticmethod
    def _render_all(
        conversation: list[Message],
        shapes: frozenset[int],
        template: ChatTemplate | Family,
        context: ChatContext,
    ) -> str | list[int]:
        if not isinstance(template, ChatTemplate):
            return template.render(conversation, context)
        seen = conversation if template.knows_developer else without_developer_role(conversation)

        def render(messages: list[Message]) -> str:
            return template.render({**context.names, "messages": messages}, shapes)

        return continue_final(seen, template.source, render) if context.continue_final else render(seen)

    async def _tokenize(self, entry: Entry, text: str, parent: Entry | None) -> int:
        """Fill in text, cut points and ids; reuses ``parent``'s up to the last cut both share.

        Returns the number of tokens reused.
        """
        kept = self._shared_cuts(parent, text) if parent is not None else 0
        begin = parent.starts[kept] if parent is not None and kept else 0
        rest = text[begin:] if begin else text
        if len(rest) > self._settings.inline_chars_max * (_FASTER if self.tokenizer.is_fast else 1):
            starts, tail = await self._workers.run(lambda: self.tokenizer.encode_cut(rest))
        else:
            starts, tail = self.tokenizer.encode_cut(rest)
        reused = parent.counts[kept] if parent is not None and kept else 0
        entry.text = text
        entry.starts = parent.starts[:kept] if parent is not None else []
        entry.counts = parent.counts[:kept] if parent is not None else []
        entry.ids = parent.ids[:reused] + tail.ids if parent is not None and reused else tail.ids
        entry.starts += [begin + start for start in starts]
        entry.counts += [reused + count for count in tail.offsets[:-1]]
        self._stats.tokens_new += len(tail.ids)
        return reused

    def _shared_cuts(self, parent: Entry, text: str) -> int:
        """The last piece of ``parent`` before which both texts are equal and at which both are cut."""
        if not parent.starts:
            return 0
        middle = _same_segment(parent, text)
        low, high = 0, middle + 1  # texts are equal up to starts[low], maybe not up to starts[high]
        while high - low > 1:
            if text.startswith(parent.text[: parent.starts[middle]]):
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        while low and not self.tokenizer.may_cut(text, parent.starts[low]):
            low -= 1
        return low

    def _truncated(self, ids: Ids, body: ChatBody | CompletionBody, special: bool) -> Ids:
        frame = 0
        if special and self.tokenizer.prefix is not None and self.tokenizer.suffix is not None:
            frame = len(self.tokenizer.prefix) + len(self.tokenizer.suffix)
        return truncated(ids, body, max_model_len=self._config.max_model_len, from_text=True, frame=frame)

    def _keep(self, entry: Entry, parent: Entry | None, known: int) -> Entry:
        if not entry.ids:
            raise NotLocalError("empty")
        if parent is not None:
            shared = common_tokens(parent.ids, entry.ids, known)
            self._stats.tokens_reused += shared
            entry.inherit(parent, shared)
        self._cache.put(entry)
        return entry


def _same_segment(parent: Entry, text: str) -> int:
    """The last cut before which both texts may be equal: of a few, and by what is right before each."""
    starts = parent.starts
    last = len(starts) - 1
    for cut in range(last, max(0, last - _LOOKED_BACK), -1):
        if text.startswith(parent.text[starts[cut - 1] : starts[cut]], starts[cut - 1]):
            return cut
    return last


def _by_the_clock(template: ChatTemplate | Family) -> bool:
    return isinstance(template, ChatTemplate) and template.depends_on_time


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise NotLocalError("field")
    return value
