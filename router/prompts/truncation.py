"""``truncate_prompt_tokens`` as vLLM 0.32 applies it, if that can be known here.

Without ``truncation_side`` the tokenizer itself truncates, keeping the end (vLLM sets its side to "left"
for generation); with it, the finished ids are sliced, after a cut by characters of texts that exceed the
model's length anyway.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.request import ChatBody, CompletionBody, NotLocalError


def ids_of(tokens: Iterable[int]) -> Ids:
    """Ids as an array. Raises ``NotLocalError`` for numbers that are not token ids."""
    try:
        return array("I", tokens)
    except OverflowError:
        raise NotLocalError("field") from None


def truncated(
    ids: Ids,
    body: ChatBody | CompletionBody,
    *,
    max_model_len: int | None,
    from_text: bool,
    frame: int = 0,
) -> Ids:
    """The ids after truncation. ``frame``: special tokens added around the text's own ids.

    Raises ``NotLocalError("truncation")`` if the result depends on unknown facts.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if type(keep) is not int or keep < -1 or body.truncation_side not in (None, "left", "right"):
        raise NotLocalError("field")
    if keep == -1:
        if max_model_len is None:
            raise NotLocalError("truncation")
        keep = max_model_len - 1 if _max_output(body) else max_model_len
    if len(ids) <= keep:
        return ids
    if keep == 0:
        raise NotLocalError("empty")
    if from_text and body.truncation_side is None and frame:
        # The tokenizer keeps its frame and cuts within it.
        raise NotLocalError("truncation")
    if from_text and body.truncation_side is not None and len(ids) > (max_model_len or 0):
        # The text may have been cut by characters before.
        raise NotLocalError("truncation")
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def _max_output(body: ChatBody | CompletionBody) -> int:
    asked = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    return asked if isinstance(asked, int) else 0
