"""``config.json`` in the shapes that models have, and in those they should not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.prompts.model_config import ModelConfigFile, read_model_file

FULL, SLIDING, CHUNKED = "full_attention", "sliding_window", "chunked_local_attention"


def read(folder: Path, content: dict[str, Any] | str) -> ModelConfigFile:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return read_model_file(folder)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"attention_chunk_size": 64}, 64),
        ({"attention_chunk_size": 64, "text_config": {"attention_chunk_size": 8192}}, 8192),
        ({"attention_chunk_size": None}, None),
        ({"attention_chunk_size": True}, None),
        ({"attention_chunk_size": -1}, None),
        ("[]", None),
        ("no json", None),
        ("[" * 100_000, None),
    ],
)
def test_chunks(tmp_path: Path, content: dict[str, Any] | str, size: int | None) -> None:
    assert read(tmp_path, content).attention_chunk_size == size
    assert read_model_file(tmp_path / "nowhere") == ModelConfigFile()


OSS = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": 34}


@pytest.mark.parametrize(
    ("content", "groups"),
    [
        (OSS, (SLIDING, FULL)),
        ({"text_config": GEMMA, "model_type": "gemma3"}, (SLIDING,) * 6 + (FULL,)),
        ({"text_config": GEMMA | {"sliding_window_pattern": 2}}, (SLIDING, FULL)),
        (OSS | {"num_kv_shared_layers": 12}, (SLIDING, FULL)),
        (OSS | {"layer_types": ["full_attention", *["chunked_attention"] * 3] * 4}, (FULL, *[CHUNKED] * 3)),
        ({"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 32}, (SLIDING,)),
        (OSS | {"sliding_window": None}, (FULL,)),
        (OSS | {"use_sliding_window": False}, (FULL,)),
        (OSS | {"layer_types": ["full_attention", "linear_attention"]}, ()),
        (OSS | {"layer_types": [None, 3]}, ()),
        (OSS | {"layer_types": []}, ()),
        (OSS | {"num_kv_shared_layers": 99}, ()),
        ({"model_type": "other", "sliding_window": 4096, "num_hidden_layers": 32}, ()),
    ],
)
def test_kinds_of_groups(tmp_path: Path, content: dict[str, Any], groups: tuple[str, ...]) -> None:
    file = read(tmp_path, content)
    if groups:
        assert file.group_kinds(len(groups)) == groups
    assert not any(file.group_kinds(count) for count in range(1, 12) if count != len(groups))


def test_either_rule_of_padding(tmp_path: Path) -> None:
    """20 layers and 28: two groups, or three where vLLM pads less."""
    types = ["full_attention"] * 20 + ["sliding_attention"] * 28
    file = read(tmp_path, {"sliding_window": 64, "layer_types": types})
    assert file.group_kinds(2) == (FULL, SLIDING)
    assert file.group_kinds(3) == (FULL, SLIDING, SLIDING)


def test_windows_that_the_file_does_not_have() -> None:
    groups = GroupSpec(0, FULL, 16), GroupSpec(1, SLIDING, 16, sliding_window=64)
    assert ModelConfigFile(sliding_window=128).other_windows(groups) == [64]
    assert ModelConfigFile(sliding_window=64).other_windows(groups) == []
    assert ModelConfigFile().other_windows(groups) == []


@pytest.mark.parametrize(
    ("content", "drafter"),
    [
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, "mtp_num_hidden_layers"),
        ({"num_nextn_predict_layers": 0}, ""),
        ({}, ""),
    ],
)
def test_layers_of_a_drafter(tmp_path: Path, content: dict[str, Any], drafter: str) -> None:
    assert read(tmp_path, content).drafter == drafter
