"""What a model family is to the prompt reader, and which one a model directory is of.

A family reproduces the code by which vLLM 0.32 renders a model's chats: to text, which is tokenized as a
rendered template is, or to ids. What it cannot be certain of it refuses with ``NotLocalError``; a
conversation that the engine would refuse raises ``TemplateRejectsError``. Families hold no state that
changes; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import NoReturn, Protocol

from router.prompts.chat.context import ChatContext
from router.prompts.chat.messages import Message
from router.prompts.cuts import Encoded, Ids
from router.prompts.families.deepseek import DeepseekV4, DeepseekV32
from router.prompts.request import ChatBody, NotLocalError

# A family whose package or vocabulary is not there: its chats are left to a render server or an engine.


class Missing(Exception):  # noqa: N818  # a state more than an error
    """``str()`` says what is missing and how to get it."""

    def family(self) -> MissingFamily:
        """What stands for the family."""
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
    """What ``tokens.tokenizer.PromptTokenizer`` is to the reader; a family may bring its own."""

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
    """How one family's chats become tokens. ``name`` is for people and says with which package."""

    name: str

    @property
    def variables(self) -> Container[str]: ...

    """The template arguments it reads."""
    takes_defaults: bool
    """Whether the server's default template arguments reach it."""

    @property
    def paths(self) -> frozenset[str]: ...

    """The APIs whose prompts it makes; for others the engine has code of its own."""

    def stamp(self) -> bytes:
        """What prompts depend on besides the request (today's date), or nothing."""

    def check(self, body: ChatBody) -> None:
        """Raises ``NotLocalError`` for fields whose effect is not reproduced."""

    def parse(self, message: Message) -> Message:
        """One validated message of the request, as ``render`` takes it; kept for next turns."""

    def render(self, conversation: list[Message], context: ChatContext) -> str | list[int]:
        """The prompt's text, to be tokenized, or its ids."""


def family_of(
    renderer: str, folder: Path, template: str | None, time_zone: str | None = None
) -> Family | None:
    """The family that vLLM's renderer of this name stands for; None where it is not reproduced. ``template``
    and ``time_zone`` are the engines' own, for families that take one."""
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
