"""Mistral's own tokenizers (tekken and SentencePiece) and chat format, by mistral-common, as in vLLM.

The prompt is made by the package, in the mode in which vLLM runs it; this module adds what vLLM does around
it: tool call ids are cut to their last nine characters, some fields are refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES
from kvatlas.router.prompts.chat.compiled import TemplateRejectsError
from kvatlas.router.prompts.chat.messages import Message, parse_message
from kvatlas.router.prompts.chat.template import ChatContext
from kvatlas.router.prompts.cuts import Encoded, Ids
from kvatlas.router.prompts.families.base import Missing
from kvatlas.router.prompts.request import ChatBody, NotLocalError

try:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
except ImportError:
    MistralTokenizer = None  # type: ignore[misc,assignment]

_ID_CHARS = 9


def mistral_file(folder: Path) -> Path | None:
    """The tokenizer file that vLLM would use: tekken, else the last SentencePiece version."""
    tekken = folder / "tekken.json"
    if tekken.is_file():
        return tekken
    return max(folder.glob("tokenizer.model.v*"), default=None)


class Mistral:
    """Renders to ids, and tokenizes texts. Raises ``Missing`` without the package."""

    variables: frozenset[str] = frozenset()
    takes_defaults = False
    paths = frozenset({CHAT, COMPLETION, MESSAGES})
    is_fast = False
    adds_nothing = False

    def __init__(self, folder: Path) -> None:
        if MistralTokenizer is None:
            raise Missing(
                "Mistral's tokenizer needs a package; in a checkout: python -m pip install '.[mistral]'"
            )
        file = mistral_file(folder)
        if file is None:
            raise Missing(f"{folder}: no tekken.json and no tokenizer.model.v* for Mistral's tokenizer")
        try:
            self._mistral = MistralTokenizer.from_file(str(file), mode=ValidationMode.test)
        except Exception as error:  # noqa: BLE001  # the package checks little before it reads
            raise Missing(f"{file}: mistral-common cannot read it: {describe_error(error)}") from None
        self._tokenizer = self._mistral.instruct_tokenizer.tokenizer
        self.name = f"mistral-common {version('mistral-common')} ({file.name})"
        self.prefix: Ids | None = array("I", [self._tokenizer.bos_id])
        self.suffix: Ids | None = array("I")
        number = str(self._tokenizer.version.value).rpartition("v")[2]
        self._takes_effort = int(number) >= 15

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> None:
        if body.chat_template_kwargs is not None:
            raise NotLocalError("template_kwargs")
        if body.truncate_prompt_tokens is not None:
            raise NotLocalError("truncation")
        if body.reasoning_effort is not None:
            raise NotLocalError("field")

    def parse(self, message: Message) -> Message:
        """The message itself, after a check that vLLM would not change anything in it."""
        parse_message(message, "string")
        content = message.get("content")
        if not isinstance(content, str | None) and not all(map(_is_plain_text, content)):
            raise NotLocalError("message_shape")
        known = {"role", "content", "tool_calls", "tool_call_id", "name"}
        if not message.keys() <= known or ("name" in message and message["role"] != "tool"):
            raise NotLocalError("message_shape")
        result = dict(message)
        if message["role"] == "assistant":
            result["tool_calls"] = [
                {**call, "id": call["id"][-_ID_CHARS:]} for call in message.get("tool_calls") or ()
            ]
        elif message["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
            result["tool_call_id"] = message["tool_call_id"][-_ID_CHARS:]
        return result

    def render(self, conversation: list[Message], context: ChatContext) -> list[int]:
        last_is_answer = conversation[-1]["role"] == "assistant"
        if context.names["add_generation_prompt"] and last_is_answer:
            raise TemplateRejectsError("the last message is the assistant's")
        if context.continue_final and not last_is_answer:
            raise TemplateRejectsError("the last message is not the assistant's")
        options: dict[str, Any] = {"reasoning_effort": None} if self._takes_effort else {}
        try:
            request = ChatCompletionRequest.from_openai(
                messages=[dict(message) for message in conversation],
                tools=context.names["tools"],
                continue_final_message=context.continue_final,
                **options,
            )
            ids: list[int] = self._mistral.encode_chat_completion(request).tokens
        except Exception as error:  # noqa: BLE001  # the engine runs the same code and answers 400
            raise TemplateRejectsError(str(error)) from None
        return ids

    def decode(self, ids: Sequence[int], *, skips_special: bool) -> str | None:
        """Its package decodes whole messages only."""
        return None

    def encode_cut(self, text: str, begin: int = 0) -> tuple[list[int], Encoded]:
        """A completion's text; no cut is known to be safe."""
        ids = array("I", self._tokenizer.encode(text[begin:], bos=False, eos=False))
        return [begin], Encoded(ids, [0, len(ids)])

    def may_cut(self, _text: str, _at: int) -> bool:
        """No place is known to be safe."""
        return False


def _is_plain_text(part: Any) -> bool:
    return isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
