"""A model directory of a model that sees images (Idefics 3, which cuts them into tiles), and images for it.

Real vLLM renders its prompts: a tile is 56 x 56 pixels and four tokens, an image has as many tiles as its
shape takes. There are no weights; a render server needs none, an engine could fill them at random.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support.prompts.readers import byte_level_tokenizer

_MARK = "<image>"
_TOKENS = (_MARK, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    + _MARK
    + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
_SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
_TILE_PIXELS, _PATCH_PIXELS, _SCALE = 56, 14, 2


def write_tiny_image_model(folder: Path) -> Path:
    """Write tokenizer, template and configurations into ``folder`` (made if absent) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    written = {
        "config": _config(tokenizer),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|eos|>",
        },
        "preprocessor_config": _image_processor(),
        "processor_config": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": (_TILE_PIXELS // _PATCH_PIXELS // _SCALE) ** 2,
        },
    }
    for name, value in written.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.get_vocab_size() + 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 1,
        **_SMALL,
    }
    vision = {"model_type": "idefics3_vision", "image_size": _TILE_PIXELS, "patch_size": _PATCH_PIXELS}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": tokenizer.token_to_id(_MARK),
        "scale_factor": _SCALE,
        "dtype": "float32",
        "pad_token_id": 1,
        "text_config": text,
        "vision_config": {**vision, **_SMALL},
    }


def _image_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": 2 * _TILE_PIXELS},
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": _TILE_PIXELS},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_pad": True,
    }


def png(width: int, height: int, colour: tuple[int, int, int]) -> str:
    """An image of one colour, in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = (b"\0" + bytes(colour) * width) * height
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()
