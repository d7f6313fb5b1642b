"""A greedy model with one answer, which says its token ids, as behind vLLM's frontend (0.32)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvatlas.router.openai.apis import CHAT

PROMPT = [7, 300, 11, 12]
EOS = 1
DONE = b"data: [DONE]\n\n"
_PIECES: dict[int, bytes] = {}


def token(piece: bytes) -> int:
    """Id of a token of these bytes."""
    number = 1000 + int.from_bytes(piece + bytes([len(piece)]), "little") % (1 << 31)
    _PIECES[number] = piece
    return number


def decode(ids: Sequence[int]) -> str:
    return b"".join(_PIECES.get(one, b"") for one in ids).decode("utf-8", "replace")


class TextEngine:
    """A greedy model with one answer, behind vLLM's frontend (0.32): text lags behind the tokens where a
    character is not whole or a stop string may begin."""

    def __init__(self, answer: Sequence[int], chunk: int = 1, *, later: bool = False) -> None:
        self.answer = [*answer, EOS]
        self.chunk = chunk
        self.later = later
        """Whether its events are those of 0.33, which have more members."""

    def events(self, path: str, body: dict[str, Any], name: str = "one") -> Iterator[bytes]:  # noqa: C901
        chat, asks = path == CHAT, body.get("return_token_ids", False)
        prompt = PROMPT if chat or isinstance(body["prompt"], str) else body["prompt"]
        assert prompt[: len(PROMPT)] == PROMPT
        so_far = prompt[len(PROMPT) :]
        assert so_far == self.answer[: len(so_far)]
        most = body.get("max_tokens", 10_000 if chat else 16)
        left = self.answer[len(so_far) :][:most]
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        includes, least = body.get("include_stop_str_in_output", False), body.get("min_tokens", 0)
        held = max(map(len, stops)) - 1 if stops and not includes else 0
        options = body.get("stream_options", {})
        head = {
            "id": name,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 5,
            "model": "m",
        }
        # One that is primed with a half character gives all of its prompt.
        primed = decode(prompt)
        text = primed if primed.endswith("\ufffd") else ""
        base = "" if text else primed
        sent, offset, ended, count = 0, 0, None, 0
        if chat:
            first = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            told = {"prompt_token_ids": prompt if asks else None, "prompt_text": None}
            yield self.event({**head, "choices": [first], **told})
        ids: list[int] = []
        for number in range(0, len(left), self.chunk):
            new, stop = left[number : number + self.chunk], None
            for one in new:
                ids.append(one)
                if one == EOS:
                    break
                whole = decode([*prompt, *ids]).removeprefix(base)
                before, text = text, text if whole.endswith("\ufffd") else whole
                if len(ids) <= least or stop is not None or len(text) == len(before):
                    continue
                found = [
                    (text.find(each, max(0, len(before) - len(each) + 1)) + len(each), each)
                    for each in stops
                    if text.find(each, max(0, len(before) - len(each) + 1)) >= 0
                ]
                if found:
                    end, stop = min(found, key=lambda pair: pair[0])
                    text = text[: end if includes else end - len(stop)]
                    ended = "stop"
                    break
            if ended is None and (ids[-1] == EOS or len(ids) == most):
                ended = "stop" if ids[-1] == EOS else "length"
            new = ids[count:]
            count = len(ids)
            upto = len(text) - (0 if ended else held)
            delta, sent = text[sent:upto] if upto > sent else "", max(sent, upto)
            logprobs, offset = self._logprobs(chat, body, new, offset)
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": delta}} if chat else {"text": delta}
            choice |= {"logprobs": logprobs, "finish_reason": ended}
            if ended or not chat:
                choice["stop_reason"] = stop
            if not chat:
                choice["prompt_token_ids"] = prompt if asks and not number else None
            choice["token_ids"] = new if asks else None
            event: dict[str, Any] = {**head, "choices": [choice]}
            if options.get("include_usage") and options.get("continuous_usage_stats"):
                event["usage"] = self._usage(prompt, count)
            yield self.event(self._with_more(event, chat=chat) if self.later else event)
            if ended:
                break
        if options.get("include_usage"):
            yield self.event({**head, "choices": [], "usage": self._usage(prompt, count)})
        yield DONE

    @staticmethod
    def _with_more(event: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        (choice,) = event["choices"]
        if choice["finish_reason"] or not chat:
            choice["weight_versions"] = None
        return {**event, "kv_transfer_params": None}

    @staticmethod
    def _usage(prompt: Sequence[int], count: int) -> dict[str, int]:
        whole = len(prompt) + count
        return {"prompt_tokens": len(prompt), "total_tokens": whole, "completion_tokens": count}

    @staticmethod
    def _logprobs(chat: bool, body: dict[str, Any], new: list[int], offset: int) -> tuple[Any, int]:
        most = body.get("top_logprobs", 0) if chat else body.get("logprobs")
        if most is None or (chat and not body.get("logprobs")):
            return None, offset
        tokens = [decode([one]) for one in new]
        tops = [{word: -0.25, **{f"{word}{n}": -1.5 - n for n in range(most)}} for word in tokens]
        if chat:
            content = [
                {
                    **_likely(word, -0.25),
                    "top_logprobs": [_likely(*pair) for pair in itertools.islice(top.items(), most)],
                }
                for word, top in zip(tokens, tops, strict=True)
            ]
            return {"content": content}, offset
        offsets = list(itertools.accumulate(map(len, tokens), initial=offset))
        found = {
            "text_offset": offsets[:-1],
            "token_logprobs": [-0.25] * len(tokens),
            "tokens": tokens,
            "top_logprobs": tops,
        }
        return found, offsets[-1]

    @staticmethod
    def event(event: dict[str, Any]) -> bytes:
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return f"data: {text}\n\n".encode()


def _likely(word: str, value: float) -> dict[str, Any]:
    return {"token": word, "logprob": value, "bytes": list(word.encode())}
