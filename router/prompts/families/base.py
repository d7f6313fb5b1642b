"""Interface of a model family, and the choice of the family of a model directory.

A family reproduces the code by which vLLM 0.32 renders a model's chats: to text, which is tokenized like a
rendered template, or to ids. It refuses uncertain inputs with ``NotLocalError``; a conversation that the
engine would refuse raises ``TemplateRejectsError``. Families have no changing state; any thread may call
them.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import NoReturn, Protocol

from router.prompts.chat.messages import Message
from router.prompts.chat.template import ChatContext
from router.prompts.cuts import Encoded, Ids
from router.prompts.families.deepseek import DeepseekV4, DeepseekV32
from router.prompts.request import ChatBody, NotLocalError

# A family whose package or vocabulary is missing: its chats are left to a render server or an engine.


class Missing(Exception):  # noqa: N818  # a state more than an error
    """``str()`` says what is missing and how to get it."""

    def family(self) -> MissingFamily:
        """Return the stand-in for the family."""
        return MissingFamily(str(self))


class MissingFamily:
    """Refuses every chat, and says in ``name`` what to install or set."""

    variables: frozenset[str] = frozenset()
    takes_defaults = False
    paths: frozenset[str] = frozenset()

    def __init__(self, problem: str) -> None:
        self.name = problem

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> NoReturn:
        raise NotLocalError("renderer")

    def parse(self, message: Message) -> NoReturn:
        raise NotLocalError("renderer")

    def render(self, conversation: list[Message], context: ChatContext) -> NoReturn:
        raise NotLocalError("renderer")


class TextTokenizer(Protocol):
    """Interface of ``tokenizer.PromptTokenizer`` used by the reader; a family may bring its own."""

    name: str
    prefix: Ids | None
    suffix: Ids | None

    @property
    def is_fast(self) -> bool: ...

    @property
    def adds_nothing(self) -> bool: ...

    def may_cut(self, text: str, at: int, /) -> bool: ...

    def encode_cut(self, text: str, begin: int = 0) -> tuple[list[int], Encoded]: ...


class Family(Protocol):
    """Converts one family's chats to tokens. ``name`` is shown to users and names the package."""

    name: str

    @property
    def variables(self) -> Container[str]: ...

    """Template arguments that it reads."""
    takes_defaults: bool
    """Whether the server's default template arguments reach it."""

    @property
    def paths(self) -> frozenset[str]: ...

    """APIs whose prompts it makes; the engine has separate code for the others."""

    def stamp(self) -> bytes:
        """Inputs of prompts besides the request (today's date), or nothing."""

    def check(self, body: ChatBody) -> None:
        """Raise ``NotLocalError`` for fields whose effect is not reproduced."""

    def parse(self, message: Message) -> Message:
        """Convert one validated message of the request for ``render``; cached for next turns."""

    def render(self, conversation: list[Message], context: ChatContext) -> str | list[int]:
        """Return the prompt's text, to be tokenized, or its ids."""


def family_of(
    renderer: str, folder: Path, template: str | None, time_zone: str | None = None
) -> Family | None:
    """Return the family of vLLM's renderer of this name; None if it is not reproduced. ``template`` and
    ``time_zone`` are the engines' own, for families that use them."""
    if renderer == "deepseek_v32":
        return DeepseekV32()
    if renderer == "deepseek_v4":
        return DeepseekV4()
    try:
        # Their packages take up to half a second to import.
        if renderer == "harmony":
            from router.prompts.families.harmony import Harmony  # noqa: PLC0415

            return Harmony(time_zone)
        if renderer == "cohere":
            from router.prompts.families.cohere import Cohere  # noqa: PLC0415

            return Cohere(template)
        if renderer == "mistral":
            from router.prompts.families.mistral import Mistral  # noqa: PLC0415

            return Mistral(folder)
    except Missing as problem:
        return problem.family()
    return None
