"""A family whose package or vocabulary is not there: its chats are left to a render server or an engine."""

from __future__ import annotations

from typing import NoReturn

from router.prompts.chat.context import ChatContext
from router.prompts.chat.messages import Message
from router.prompts.request import ChatBody, NotLocalError


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
