"""One model's chats as text or ids: by its templates, or by the code of its family.

Messages are decoded and converted to the engine's form once and cached; a next turn renders all of them
again, which is cheap, since a template may make the text of a message depend on any other.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvatlas.router.fleet.status import Frontend
from kvatlas.router.prompts.chat.anthropic import disabled_effort, wants_system_first
from kvatlas.router.prompts.chat.compiled import TemplateRejectsError
from kvatlas.router.prompts.chat.conversions import TemplateTraits
from kvatlas.router.prompts.chat.messages import (
    Message,
    only_text,
    parse_message,
    text_message,
    without_developer_role,
)
from kvatlas.router.prompts.chat.skeletons import MESSAGES_MAX, PrecompiledLayout
from kvatlas.router.prompts.chat.template import (
    ChatContext,
    ChatTemplate,
    ContextCache,
    ContextKey,
    chat_context,
    continue_final,
    message_shape,
    parse_tools,
)
from kvatlas.router.prompts.conversation import KnownMessage
from kvatlas.router.prompts.families.base import (
    Family,
    Missing,
    MissingFamily,
    RustFrontend,
    SglangFrontend,
    is_rendered_by_sglang,
)
from kvatlas.router.prompts.families.deepseek import DeepseekV32
from kvatlas.router.prompts.families.deepseek_v4 import DeepseekV4
from kvatlas.router.prompts.model_dir import ModelDir, load_chat_template
from kvatlas.router.prompts.request import (
    ChatBody,
    NotLocalError,
    decode_message,
    kept_bytes,
    num_values,
    plain_message,
)
from kvatlas.router.prompts.settings import ModelPrompts, PromptStats

# Size of a known message besides its text and its converted form.
_MESSAGE_BYTES: Final = 200
_IMAGE_BYTES: Final = 80
# Longer roles, which only clients invent, are not kept with what was learned about a template.
_ROLE_CHARS_MAX: Final = 32


# Shapes of plain messages.
_PLAIN: Final = {
    (role, form): message_shape(text_message(role, "", form))
    for role in ("user", "assistant")
    for form in ("string", "openai")
}


class ChatForm(NamedTuple):
    """The renderer of a chat, and its inputs besides the messages."""

    template: ChatTemplate | Family
    context: ChatContext

    @property
    def by_the_clock(self) -> bool:
        """Whether the same messages may give another prompt the next time."""
        return isinstance(self.template, ChatTemplate) and self.template.depends_on_time


class ChatRenderer:
    """Templates, family and contexts of one model. ``form_of`` and ``render`` may be called in any thread."""

    def __init__(
        self,
        config: ModelPrompts,
        directory: ModelDir,
        stats: PromptStats,
        context_bytes_max: int,
        frontend: Frontend = "python",
    ) -> None:
        self._config = config
        self._stats = stats
        self.name = directory.renderer
        self.family = (
            _family_of(self.name, directory.folder, config.time_zone)
            if frontend == "python"
            else self._other_frontend(directory, RustFrontend if frontend == "rust" else SglangFrontend)
        )
        self._special_tokens = directory.special_tokens if self.family is None else {}
        takes_defaults = self.family is None or self.family.takes_defaults
        self._defaults = config.default_chat_template_kwargs if takes_defaults else {}
        self.templates = self._load_templates(directory)
        self._contexts = ContextCache(stats, context_bytes_max)

    def _other_frontend(
        self, directory: ModelDir, frontend: type[RustFrontend | SglangFrontend]
    ) -> RustFrontend | SglangFrontend | MissingFamily:
        sources = {self._template_source(directory, with_tools=with_tools) for with_tools in (False, True)}
        source = sources.pop()
        own = frontend is SglangFrontend and is_rendered_by_sglang(directory)
        if self.name != "hf" or sources or source is None or own:
            return MissingFamily(f"the {frontend.name} has code of its own for this model's chats")
        return frontend(source, directory.special_tokens, self._config)

    def _load_templates(self, directory: ModelDir) -> dict[bool, ChatTemplate | None]:
        """Templates by whether the chat has tools; one object if both are the same."""
        loaded: dict[str, ChatTemplate] = {}
        templates: dict[bool, ChatTemplate | None] = {False: None, True: None}
        for with_tools in templates:
            source = self._template_source(directory, with_tools=with_tools)
            if source is None:
                continue
            if source not in loaded:
                loaded[source] = ChatTemplate(
                    source,
                    self._stats,
                    self._special_tokens,
                    self._config.time_zone,
                    self._config.chat_template_content_format,
                )
            templates[with_tools] = loaded[source]
        return templates

    def _template_source(self, directory: ModelDir, *, with_tools: bool) -> str | None:
        given = self._config.chat_template
        if given is None:
            return directory.template_for(with_tools=with_tools)
        return directory.templates.get(given) or load_chat_template(given)

    def clear(self) -> None:
        """Clear the caches: the model is not served any more."""
        self._contexts.clear()

    @property
    def unreadable(self) -> str | None:
        """Why chats of this model are not rendered here, and the remedy; None: they are."""
        if isinstance(self.family, MissingFamily):
            return self.family.name
        if self.name != "hf" and self.family is None:
            return f"{self.name}: vLLM's own code renders these chats; give a render server (--renderer)"
        return None

    @cached_property
    def traits(self) -> TemplateTraits:
        """Properties of the template that engines detect at start, or were given; if code renders, those of
        the template that they were given, if any."""
        sources = [None if one is None else one.source for one in self.templates.values()]
        if self.name not in {"hf", "harmony"} and self._config.chat_template is None:
            sources = [None]
        effort = self._config.anthropic_disabled_thinking_effort
        if effort == "auto":
            effort = disabled_effort(self._short_chat)
        return TemplateTraits(any(map(wants_system_first, sources)), effort)

    def _short_chat(self, effort: str) -> str | list[int] | None:
        body = ChatBody(messages=[msgspec.Raw(b'{"role":"user","content":"Hi"}')], reasoning_effort=effort)
        try:
            self.check(body)
            return self.render(body, [], self.form_of(body, None))[1]
        except NotLocalError:
            return None

    @property
    def reads_clock(self) -> bool:
        """Whether prompts of chats contain the engines' local time."""
        templates = [one for one in self.templates.values() if one is not None]
        return self.name == "harmony" or any(one.depends_on_time for one in templates)

    def reads(self, path: str) -> bool:
        """Whether the prompts of this API are made here; the family's engines may have other code for it."""
        return self.family is None or path in self.family.paths

    def check(self, body: ChatBody) -> None:
        """Raise ``NotLocalError`` for fields that the model's family does not reproduce."""
        if self.family is not None:
            self.family.check(body)

    def known_form(self, key: ContextKey | None) -> ChatForm | None:
        """The form of an earlier plain request with this key (``context_key``)."""
        found = None if key is None else self._contexts.get(key)
        return None if found is None else ChatForm(*found)

    def form_of(self, body: ChatBody, key: ContextKey | None) -> ChatForm:
        """Template and context, cached under ``key``. Raises ``NotLocalError``."""
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
        return ChatForm(template, context)

    def plain(self, raws: list[msgspec.Raw], template: ChatTemplate | Family) -> list[KnownMessage]:
        """Convert the leading messages that have only a role and a text: a few steps for each."""
        made: list[KnownMessage] = []
        if not isinstance(template, ChatTemplate):
            return made
        form = template.content_format
        for raw in raws:
            said = plain_message(raw)
            if said is None:
                break
            role, text = said.role, said.content
            size = _MESSAGE_BYTES + len(raw) + text.__sizeof__()
            shape = _PLAIN[role, form]
            if text:
                made.append(KnownMessage(raw.copy(), role, text, shape, size))
            else:
                made.append(KnownMessage(raw.copy(), "", "", shape, size, 1, text_message(role, text, form)))
        return made

    def layout_of(
        self, messages: list[KnownMessage], form: ChatForm
    ) -> tuple[PrecompiledLayout, list[str]] | None:
        """The layout of a chat, if it is known, and the texts that it is written around; None: it must be
        rendered."""
        template, context = form
        if context.continue_final or len(messages) > MESSAGES_MAX or not isinstance(template, ChatTemplate):
            return None
        roles: list[str] = []
        texts: list[str] = []
        for one in messages:
            roles.append(one.role)
            texts.append(one.text)
        key = context.key, template.content_format, tuple(roles)
        layout = template.layout_of(context.names, texts, key)
        return None if layout is None else (layout, texts)

    def render(
        self, body: ChatBody, known: list[KnownMessage], form: ChatForm
    ) -> tuple[list[KnownMessage], str | list[int]]:
        """Return all messages of a chat whose first ones are known, and its text, or the family's ids. Raises
        ``NotLocalError``, ``ApiError`` 400."""
        template, context = form
        messages = list(known)
        for raw in body.messages[len(known) :]:
            messages.append(self._read(raw, len(messages), template, orders_calls=body.orders_tool_calls))
        if not messages:
            raise NotLocalError("template_rejected")
        try:
            if isinstance(template, ChatTemplate):
                return messages, self._by_template(messages, template, context)
            return messages, template.render([one.as_message("") for one in messages], context)
        except TemplateRejectsError:
            raise NotLocalError("template_rejected") from None

    def _by_template(self, known: list[KnownMessage], template: ChatTemplate, context: ChatContext) -> str:
        found = self.layout_of(known, ChatForm(template, context))
        if found is not None:
            layout, texts = found
            return "".join(layout.written(texts))
        text = _rendered(known, template, context)
        roles = tuple([one.role for one in known])
        if "" not in roles and not context.continue_final:
            key = context.key, template.content_format, roles
            template.learn(context.names, [one.text for one in known], key, text)
        return text

    def _read(
        self, raw: msgspec.Raw, index: int, template: ChatTemplate | Family, *, orders_calls: bool
    ) -> KnownMessage:
        given = decode_message(raw, index)
        images: list[bytes] = []
        shape, role, text = 0, "", ""
        if isinstance(template, ChatTemplate):
            form = template.content_format
            message = parse_message(given, form, orders_calls=orders_calls, images=images)
            shape, (role, text) = message_shape(message), _plain(message, form)
        else:
            message = template.parse(given)
        plain = all([type(value) is str for value in message.values()])  # noqa: C419  # a list is faster
        kept = text.__sizeof__() if role else kept_bytes(message)
        return KnownMessage(
            # References of the body's own values are released with the body.
            raw.copy(),
            role,
            text,
            shape,
            _MESSAGE_BYTES + len(raw) + kept + _IMAGE_BYTES * len(images),
            1 if plain else num_values(raw),
            None if role else message,
            tuple(images),
        )


def _plain(message: Message, form: str) -> tuple[str, str]:
    """Role and text of a plain message. Not for developers: not every template knows them."""
    role: str = message["role"]
    if role == "developer" or len(role) > _ROLE_CHARS_MAX:
        return "", ""
    text = only_text(message, form)
    return (role, text) if text else ("", "")


def _rendered(known: list[KnownMessage], template: ChatTemplate, context: ChatContext) -> str:
    shapes = {context.shape, *[one.shape for one in known]}
    conversation = [one.as_message(template.content_format) for one in known]
    seen = conversation if template.knows_developer else without_developer_role(conversation)
    if not context.continue_final:
        return template.render({**context.names, "messages": seen}, shapes)
    return continue_final(
        seen,
        template.source,
        lambda messages: template.render({**context.names, "messages": messages}, shapes),
    )


def _family_of(renderer: str, folder: Path, time_zone: str | None) -> Family | None:
    """Return the family of vLLM's renderer of this name; None if it is not reproduced. ``time_zone`` is the
    engines' own, for families that use it."""
    if renderer == "deepseek_v32":
        return DeepseekV32()
    if renderer == "deepseek_v4":
        return DeepseekV4()
    try:
        # Their packages take up to half a second to import.
        if renderer == "harmony":
            from kvatlas.router.prompts.families.harmony import Harmony  # noqa: PLC0415

            return Harmony(time_zone)
        if renderer == "mistral":
            from kvatlas.router.prompts.families.mistral import Mistral  # noqa: PLC0415

            return Mistral(folder)
    except Missing as problem:
        return MissingFamily(str(problem))
    return None
