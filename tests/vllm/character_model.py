"""A tiny model whose greedy text is of words, emoji and CJK, each character split over several tokens.

Weights made by hand, not learned: each token's embedding says in which part of a character it leaves the
text, and the last layer allows the tokens that may follow there. Which of these comes is decided by random
weights and the attention over all tokens before, so an answer depends on its whole prompt.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tests.vllm.tiny_model import write_tiny_model

CHARACTERS = "🙂🚀🌱🔧漢字水火"
_WORDS = 24
_HIDDEN, _HEADS, _LAYERS, _MLP = 64, 2, 2, 32
_MARK, _ALLOWED, _FAVOURED = 8.0, 20.0, 1.5
"""Size of a state in an embedding; of what it allows; of what begins a character, over words."""


def write_character_model(directory: Path) -> Path:
    """Write the model into ``directory`` (made if absent) and return it; start it with
    ``--load-format safetensors``."""
    write_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    _write_safetensors(directory / "model.safetensors", _weights(tokenizer))
    return directory


def _weights(tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    size = tokenizer.get_vocab_size()
    state_of, allowed = _states(tokenizer)
    states = len(allowed)
    embedded = draw.normal(size=(size, _HIDDEN))
    embedded[:, :states] = 0.0
    embedded[np.arange(size), state_of] = _MARK
    head = draw.normal(size=(size, _HIDDEN))
    head[:, :states] = 0.0
    for state, tokens in enumerate(allowed):
        for token, favour in tokens.items():
            head[token, state] = _ALLOWED + favour
    weights = {"model.embed_tokens.weight": embedded, "lm_head.weight": head}
    weights["model.norm.weight"] = np.ones(_HIDDEN)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for part in ("q", "k", "v"):
            weights[f"{name}self_attn.{part}_proj.weight"] = draw.normal(size=(_HIDDEN, _HIDDEN)) * 0.3
        out = draw.normal(size=(_HIDDEN, _HIDDEN)) * 0.1
        out[:states] = 0.0  # it changes no state
        weights[f"{name}self_attn.o_proj.weight"] = out
        weights[f"{name}mlp.gate_proj.weight"] = draw.normal(size=(_MLP, _HIDDEN)) * 0.1
        weights[f"{name}mlp.up_proj.weight"] = draw.normal(size=(_MLP, _HIDDEN)) * 0.1
        weights[f"{name}mlp.down_proj.weight"] = np.zeros((_HIDDEN, _MLP))
        weights[f"{name}input_layernorm.weight"] = np.ones(_HIDDEN)
        weights[f"{name}post_attention_layernorm.weight"] = np.ones(_HIDDEN)
    return weights


def _states(tokenizer: Tokenizer) -> tuple[np.ndarray, list[dict[int, float]]]:
    """The state that each token leaves (0: between characters), and the tokens that a state allows."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token for text, token in vocabulary.items() if text.startswith("Ġ") and len(text) > 4)
    state_of = np.zeros(tokenizer.get_vocab_size(), dtype=int)
    allowed: list[dict[int, float]] = [dict.fromkeys(words[:_WORDS], 0.0)]
    paths: dict[tuple[int, ...], int] = {(): 0}
    for character in CHARACTERS:
        tokens = tuple(tokenizer.encode(character, add_special_tokens=False).ids)
        for place, token in enumerate(tokens):
            allowed[paths[tokens[:place]]][token] = 0.0 if place else _FAVOURED
            path = tokens[: place + 1]
            if path not in paths and place + 1 < len(tokens):
                paths[path] = state_of[token] = len(allowed)
                allowed.append({})
    return state_of, allowed


def _write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, weight in weights.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.size * 4],
        }
        at += weight.size * 4
    text = json.dumps(header).encode()
    body = b"".join(weight.astype("<f4").tobytes() for weight in weights.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
