"""One model's prompts computed here: renderer, tokenizer, and a cache of earlier prompts.

A next turn finds its conversation by the raw bytes of its messages, decodes only the new ones, writes the
text from the last message before them on if the template's layout is known (else it renders all of it),
compares it with the earlier text up to the last common cut, and tokenizes only the rest. ``template`` and
``tokenizer`` explain why the result equals computing all of it.

Cost: benchmarks/results/prompts.md.

Invariant: the result is what the engine computes, or ``NotLocalError`` is raised. Work on more than
``INLINE_CHARS_MAX`` new characters runs in a worker thread.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Final, NamedTuple, cast

import msgspec

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.prompts.chat.template import context_key
from kvatlas.router.prompts.conversation import Conversation, CutText, KnownMessage, Turn, WrittenText
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.families.base import MissingFamily, TextTokenizer
from kvatlas.router.prompts.local_renderer import ChatForm, ChatRenderer
from kvatlas.router.prompts.model_dir import ModelDir, ModelDirError
from kvatlas.router.prompts.prefix_keys import message_keys, text_keys
from kvatlas.router.prompts.prompt_cache import Earlier, PrefixCache, cached_ids
from kvatlas.router.prompts.request import (
    INLINE_VALUES_MAX,
    ChatBody,
    CompletionBody,
    NotLocalError,
    compact,
    has_many_values,
    num_values,
)
from kvatlas.router.prompts.settings import ModelPrompts, PromptSettings, PromptStats
from kvatlas.router.prompts.shared_prompts import NEW_CHARS_MIN
from kvatlas.router.prompts.tokenizer import PromptTokenizer
from kvatlas.router.prompts.truncation import ids_of, truncated
from kvatlas.router.prompts.worker_threads import Workers

# More new text than this is tokenized in a worker thread; less takes under 4 ms of the event loop.
INLINE_CHARS_MAX = 4096
# Of the tool lists of earlier chats, per model: some 1,000 lists of 16 KB.
CONTEXT_CACHE_BYTES_MAX = 16 << 20
# New messages take about 15 us each to decode, check and render: 2 ms for this many.
_INLINE_MESSAGES: Final = 128
# Finding and storing a conversation takes about 1 us per message, all of it on the event loop.
_MESSAGES_MAX: Final = 8192
# Encoding more of them as JSON is one call that holds the interpreter for 10 ms.
_TOOL_VALUES_MAX: Final = 10_000
# Names whose bare chats are cached; when full, the cache is cleared.
_KINDS_MAX: Final = 1024
# fastokens takes this many times the text inline: 0.7 ms for 16 KB of prose, 7 ms for the worst text.
_FASTER: Final = 4
# Distinguishes the entries of a model in the shared cache from those of an earlier one of the same name.
_SERIALS: Final = itertools.count()
_ENCODER: Final = msgspec.json.Encoder()
_NOTHING: Final = ids_of(())


class _Kind(NamedTuple):
    """The inputs of a chat's prompt other than its messages, in compact form (``scope``). ``special``:
    special tokens are added around it; ``tokenizer``: its tokenizer; ``by_the_clock``: the same messages may
    give another prompt the next time."""

    form: ChatForm
    scope: bytes
    special: bool
    tokenizer: str
    by_the_clock: bool


class LocalModel:
    """Renderer, tokenizer and cache of one model; event-loop thread only."""

    def __init__(
        self,
        config: ModelPrompts,
        directory: ModelDir,
        *,
        stats: PromptStats,
        cache: PrefixCache,
        workers: Workers,
        settings: PromptSettings,
        frontend: Frontend = "python",
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """``tokenizer``: of the same directory, if it is loaded already."""
        self._config = config
        self._stats = stats
        self._cache = cache
        self._workers = workers
        self._settings = settings
        self._directory = directory
        self._shared = cache.shared if directory.identity else None
        self._unlike = directory.config_tokens if frontend == "rust" else None
        """Texts that this frontend splits otherwise."""
        self._others: dict[Frontend, LocalModel] = {}
        self.renderer = ChatRenderer(config, directory, stats, CONTEXT_CACHE_BYTES_MAX, frontend)
        self.tokenizer = tokenizer or self._load_tokenizer(directory)
        self._serial = b"%d" % next(_SERIALS)
        self._bare: dict[bytes, _Kind] = {}
        """Kinds of chats that consist of messages alone, by scope."""

    def _load_tokenizer(self, directory: ModelDir) -> TextTokenizer:
        family = self.renderer.family
        if directory.tokenizer is not None:
            fast = self._settings.fast_tokenizer == "auto"
            return PromptTokenizer(directory.tokenizer, self._stats, fast=fast)
        if isinstance(family, MissingFamily):
            raise ModelDirError(family.name)
        return cast("TextTokenizer", family)  # Mistral's, which does both

    def behind(self, frontend: Frontend) -> LocalModel:
        """Return the same model behind this frontend of the engines; loaded at first use."""
        if frontend == "python":
            return self
        if frontend not in self._others:
            self._others[frontend] = LocalModel(
                self._config,
                self._directory,
                stats=self._stats,
                cache=self._cache,
                workers=self._workers,
                settings=self._settings,
                frontend=frontend,
                tokenizer=self.tokenizer,
            )
        return self._others[frontend]

    def clear(self) -> None:
        """Clear the caches: the model is not served any more."""
        self.renderer.clear()
        for other in self._others.values():
            other.clear()

    def library_names(self, *, chat: bool) -> str:
        """Name of the reader of prompts here: the tokenizer's library, or the family for chats."""
        family = self.renderer.family
        if family is None or not chat or family.name == self.tokenizer.name:
            return self.tokenizer.name
        return f"{family.name}, {self.tokenizer.name}"

    async def chat(self, body: ChatBody, extras: PromptExtras, scope: bytes, *, long: bool) -> Turn:
        """Return the prompt of a chat, with the template's marks for images; ``long``: use a thread.

        Raises ``NotLocalError``, ``ApiError`` 400.
        """
        kind = self._bare.get(scope) if body.is_bare() else None
        if kind is None or kind.tokenizer != self.tokenizer.name:
            kind = await self._kind_of(body, scope, long=long)
        if len(body.messages) > _MESSAGES_MAX:
            raise NotLocalError("too_complex")
        form, whole_scope, special, _, by_the_clock = kind
        raws = body.messages
        keys = message_keys(whole_scope, raws)
        found, shared = self._cache.find(whole_scope, keys, raws), 0
        messages: list[KnownMessage] = []
        if found is not None:
            shared, messages = found.shared, found.one.messages[: found.shared]
            if shared == len(keys) == len(found.one.keys) and not by_the_clock:
                self._stats.tokens_reused += found.over.num_tokens
                return found.over
        new, written = raws[shared:], None
        if len(new) <= _INLINE_MESSAGES and not long:
            plain = self.renderer.plain(new, form.template)
            messages += plain
            new = new[len(plain) :]
            if not new:
                written = self._put_together(found, messages, form)
        over = None if found is None else found.over
        media: tuple[bytes, ...] = ()
        whole = body.truncate_prompt_tokens is None
        if written is None:
            cut = None if found is None else found.one.whole_cut()
            render = partial(self.renderer.render, body, messages, form)
            if long or _takes_long(new, messages):
                messages, text = await self._workers.run(render)
            else:
                messages, text = render()
            media = tuple([image for one in messages for image in one.images])
            if media and (special or not whole or form.context.continue_final):
                raise NotLocalError("multimodal")
            if isinstance(text, list):  # the family's own ids, complete
                one = Conversation(whole_scope, keys, Turn(ids_of(text), extras, media), messages)
                return self._keep(one, found, over, b"")
            written = WrittenText(text, over, cut, self._num_shared(cut, text))
        shared_scope = self._shared_scope(scope, special=special)
        written = self._best_known(written, messages, shared_scope, extras)
        cut, turn = await self._tokenize(written, extras, special=special)
        if not whole:
            turn, cut = Turn(self._truncated(turn.ids, body, special), extras), None
        turn.media = media
        one = Conversation(whole_scope, keys, turn, messages, cut)
        return self._keep(one, found, written.over, shared_scope)

    def _put_together(
        self, found: Earlier | None, messages: list[KnownMessage], form: ChatForm
    ) -> WrittenText | None:
        """The text of a chat whose layout is known, from a cut that it shares with the turn before; None: it
        must be rendered."""
        known = self.renderer.layout_of(messages, form)
        if known is None:
            return None
        layout, texts = known
        cut = None if found is None else found.one.cut_before(layout, found.shared)
        spans = layout.written(texts, 0 if cut is None else cut.span)
        text = "".join(spans)
        kept = self._num_shared(cut, text)
        if found is not None and cut is not None and cut.begin and not kept:
            cut, spans = found.one.whole_cut(), layout.written(texts)
            text = "".join(spans)
            kept = self._num_shared(cut, text)
        return WrittenText(text, None if found is None else found.over, cut, kept, layout, spans)

    def _num_shared(self, cut: CutText | None, text: str) -> int:
        return 0 if cut is None else cut.num_shared(text, self.tokenizer.may_cut)

    async def completion(
        self, body: CompletionBody, prompt: str | list[int], extras: PromptExtras, scope: bytes
    ) -> Turn:
        """Return a completion's first prompt. Raises like ``chat``."""
        if body.prompt_embeds is not None:
            raise NotLocalError("embeds")
        if body.suffix is not None:
            raise NotLocalError("field")
        if not isinstance(prompt, str):
            ids = truncated(ids_of(prompt), body, max_model_len=self._config.max_model_len, from_text=False)
            return cached_ids(self._cache, self._stats, ids, extras, scope)
        special = _flag(body.add_special_tokens) and not self.tokenizer.adds_nothing
        if body.truncate_prompt_tokens is not None:
            _, whole = await self._tokenize(WrittenText(prompt), extras, special=special)
            ids = self._truncated(whole.ids, body, special)
            return cached_ids(self._cache, self._stats, ids, extras, scope)
        shared_scope = self._shared_scope(scope, special=special)
        form = (_ENCODER.encode(special), self.tokenizer.name.encode(), self._serial)
        scope = compact(b"\0".join((scope, *form)))
        keys = text_keys(scope, prompt)
        found = self._cache.find(scope, keys)
        over, cut = (None, None) if found is None else (found.over, found.one.cut)
        if over is not None and cut is not None and cut.text == prompt:
            self._stats.tokens_reused += over.num_tokens
            return over
        written = WrittenText(prompt, over, cut, self._num_shared(cut, prompt))
        written = self._best_known(written, [], shared_scope, extras)
        cut, turn = await self._tokenize(written, extras, special=special)
        return self._keep(Conversation(scope, keys, turn, [], cut), found, written.over, shared_scope)

    async def _kind_of(self, body: ChatBody, scope: bytes, *, long: bool) -> _Kind:
        """Return the inputs of the prompt other than messages. Those of bare chats are cached: one for each
        name of a model or adapter."""
        self._check(body)
        form = await self._form_of(body, long=long)
        special = _flag(body.add_special_tokens) and not self.tokenizer.adds_nothing
        whole = self._chat_scope(scope, body, form, special=special)
        kind = _Kind(form, whole, special, self.tokenizer.name, form.by_the_clock)
        if self.renderer.family is None and body.is_bare():
            if len(self._bare) >= _KINDS_MAX:
                self._bare.clear()
            self._bare[scope] = kind
        return kind

    def _check(self, body: ChatBody) -> None:
        if self.renderer.unreadable is not None:
            raise NotLocalError("renderer")
        if isinstance(body.kv_transfer_params, dict) and "prompt_token_ids" in body.kv_transfer_params:
            raise NotLocalError("field")
        if num_values(body.tools) > _TOOL_VALUES_MAX:
            raise NotLocalError("too_complex")
        self.renderer.check(body)

    async def _form_of(self, body: ChatBody, *, long: bool) -> ChatForm:
        """Template and context; those of plain requests are cached."""
        key = context_key(body)
        known = self.renderer.known_form(key)
        if known is not None:
            return known
        if long or has_many_values(body.tools, INLINE_VALUES_MAX):
            return await self._workers.run(lambda: self.renderer.form_of(body, key))
        return self.renderer.form_of(body, key)

    def _chat_scope(self, scope: bytes, body: ChatBody, form: ChatForm, *, special: bool) -> bytes:
        limits = _ENCODER.encode(
            (body.truncate_prompt_tokens, body.truncation_side, special, body.orders_tool_calls)
        )
        family = self.renderer.family
        stamp = b"" if family is None else family.stamp()
        made_by = (self.tokenizer.name.encode(), self._serial, stamp)
        return compact(b"\0".join((scope, form.context.key, limits, *made_by)))

    def _shared_scope(self, scope: bytes, *, special: bool) -> bytes:
        """Inputs of tokens and hashes besides the text, equal in all workers; empty: nothing is shared."""
        if self._shared is None:
            return b""
        return compact(
            b"\0".join((scope, self._directory.identity, self.tokenizer.name.encode(), b"%d" % special))
        )

    def _best_known(
        self, written: WrittenText, messages: list[KnownMessage], shared_scope: bytes, extras: PromptExtras
    ) -> WrittenText:
        """The same text behind another worker's prompt, if that has more of it."""
        text, before, layout, spans = written.text, written.before, written.layout, written.spans
        first, known = (0, 0) if before is None else (before.begin, before.starts[written.kept])
        if self._shared is None or first + len(text) - known < NEW_CHARS_MIN:
            return written
        if layout is not None and first:
            spans = layout.written([one.text for one in messages])
            text = "".join(spans)
        found = self._shared.find(shared_scope, text, known, extras)
        if found is None:
            return written
        turn, cut = found
        more = self._num_shared(cut, text)
        return WrittenText(text, turn, cut, more, layout, spans) if cut.starts[more] > known else written

    async def _tokenize(
        self, written: WrittenText, extras: PromptExtras, *, special: bool
    ) -> tuple[CutText, Turn]:
        """Cut and tokenize a text from the last cut that it shares with another, whose ids are reused.
        ``special``: with special tokens around the text."""
        text, over, before, kept = written.text, written.over, written.before, written.kept
        layout, spans = written.layout, written.spans
        if self._directory.rebuilt:
            raise NotLocalError("tokenizer_class")
        if self._unlike is not None and self._unlike.search(text):
            raise NotLocalError("frontend")
        prefix, suffix = self._frame(special=special) if special else (_NOTHING, _NOTHING)
        first = span = at = 0
        reused = len(prefix)
        starts: tuple[int, ...] = ()
        counts: tuple[int, ...] = ()
        if before is not None:
            first, span = before.begin, before.span
            if kept:
                at, reused = before.starts[kept] - first, before.counts[kept]
                starts, counts = before.starts[:kept], before.counts[:kept]
        if len(text) - at > INLINE_CHARS_MAX and self._is_long(len(text) - at):
            cuts, new = await self._workers.run(lambda: self.tokenizer.encode_cut(text, at))
        else:
            cuts, new = self.tokenizer.encode_cut(text, at)
        tail, offsets = new.ids, new.offsets
        self._stats.tokens_new += len(tail)
        more: list[int] = []
        for number, cut in enumerate(cuts):
            cuts[number] = first + cut
            more.append(reused + offsets[number])
        if suffix:
            tail += suffix
        if over is None or not kept:
            turn = Turn(prefix + tail if prefix else tail, extras)
        else:
            turn = Turn(tail, extras, (), over.beginning(reused), reused)
        made = CutText(text, starts + tuple(cuts), counts + tuple(more), first, layout, span)
        if layout is not None and not (first and before is not None and before.layout is layout):
            made = made.only_end(spans)
        return made, turn

    def _is_long(self, chars: int) -> bool:
        """Whether tokenizing this many characters would block the event loop."""
        return chars > INLINE_CHARS_MAX * (_FASTER if self.tokenizer.is_fast else 1)

    def _frame(self, *, special: bool) -> tuple[Ids, Ids]:
        """Tokens before and after a text's own ids. Raises ``NotLocalError`` if that is no plain frame."""
        prefix, suffix = self.tokenizer.prefix, self.tokenizer.suffix
        if prefix is None or suffix is None:
            raise NotLocalError("field")
        return prefix, suffix

    def _truncated(self, ids: Ids, body: ChatBody | CompletionBody, special: bool) -> Ids:
        frame = sum(map(len, self._frame(special=special)))
        return truncated(ids, body, max_model_len=self._config.max_model_len, from_text=True, frame=frame)

    def _keep(
        self,
        one: Conversation,
        found: Earlier | None,
        over: Turn | None,
        shared_scope: bytes,
    ) -> Turn:
        """Keep a turn whose first tokens are those of ``over``: of the conversation found, or of another
        worker."""
        turn = one.turn
        if not turn.num_tokens:
            raise NotLocalError("empty")
        if self._shared is not None:
            self._shared.offer(shared_scope, one, over, turn.at)
        if found is not None and over is found.over:
            self._cache.put_next(one, found)
        else:
            self._cache.put(one, over)
        return turn


def _takes_long(new: list[msgspec.Raw], known: list[KnownMessage]) -> bool:
    """Whether reading and rendering these would block the event loop: too many messages, or too much in
    them."""
    if len(new) > _INLINE_MESSAGES:
        return True
    limit = INLINE_VALUES_MAX
    for one in known:
        limit -= one.num_values
    if sum(map(len, new)) <= 2 * limit:  # each value takes two bytes
        return False
    return sum(map(num_values, new)) > limit


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise NotLocalError("field")
    return value
