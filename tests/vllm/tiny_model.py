"""A model directory that real vLLM serves in seconds: no weights, six layers, a tokenizer of its own.

``config.json`` describes a hybrid Gemma 3 (five sliding-window layers, one full); weights are left out
because the engine fills them at random (``--load-format dummy``). ``tokenizer.json`` is a byte-level BPE
trained on generated text, so nothing is downloaded; like many real ones it puts a BOS token before plain
text, while the chat template writes its own. The same directory is what the router loads.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SLIDING_WINDOW_TOKENS = 64
MAX_MODEL_LEN_TOKENS = 16384
_VOCAB_SIZE = 1024
_SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_tiny_model(directory: Path) -> Path:
    """Write config, tokenizer and chat template into ``directory`` (made if absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", _model_config())
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    return directory


def random_words(rng: random.Random, count: int) -> str:
    """``count`` pronounceable words: text that the tokenizer splits into a little more tokens than words."""
    return " ".join(_word(rng) for _ in range(count))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))


def _tokenizer() -> Tokenizer:
    rng = random.Random(3)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((random_words(rng, 20) for _ in range(400)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": MAX_MODEL_LEN_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config() -> dict[str, object]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": SLIDING_WINDOW_TOKENS,
        "max_position_embeddings": MAX_MODEL_LEN_TOKENS,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-06,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
