"""A model that sees images: its chat template, requests with images, and an engine that renders them."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from tokenizers import Tokenizer

from tests.support.prompts.readers import byte_level_tokenizer, say

MARK = "<|header|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + MARK + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
TOKENIZER = Tokenizer.from_str(byte_level_tokenizer())
URL = "data:image/png;base64,"


class Engine:
    """Renders chats with images as an engine does, with a number of tokens that its content decides, and the
    number of images too."""

    def __init__(self) -> None:
        self.calls = 0
        self.tokens_more = 0

    async def post(self, url: str, body: bytes, _headers: Any, _timeout_s: float) -> tuple[int, bytes]:
        self.calls += 1
        assert url.endswith("/render")
        return 200, json.dumps(self.render(json.loads(body), is_messages="messages/" in url)).encode()

    def render(self, request: dict[str, Any], *, is_messages: bool) -> dict[str, Any]:
        text, urls = "", []
        for message in request["messages"]:
            said = ""
            for part in [message["content"]] if isinstance(message["content"], str) else message["content"]:
                if isinstance(part, str) or part["type"] == "text":
                    said += part if isinstance(part, str) else part["text"]
                else:
                    said += MARK
                    urls.append(URL + part["source"]["data"] if is_messages else part["image_url"]["url"])
            text += f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"
        ids: list[int] = []
        places: list[dict[str, int]] = []
        mark = TOKENIZER.token_to_id(MARK)
        for token in TOKENIZER.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids:
            if token == mark:
                length = 3 + len(urls[len(places)]) % 7 + len(urls) + self.tokens_more
                places.append({"offset": len(ids), "length": length})
                ids += [mark] * length
            else:
                ids.append(token)
        hashes = [sha256(url.encode()).hexdigest() for url in urls]
        return {
            "token_ids": ids,
            "features": {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}},
        }


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URL + data}}


def shows(text: str, *data: str) -> dict[str, Any]:
    return say("user", [{"type": "text", "text": text}, *map(image, data)])
