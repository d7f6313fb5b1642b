"""A model directory is read with the precedence of the engine's own loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvatlas.router.prompts.model_dir import ModelDirError, load_chat_template, load_model_dir
from kvatlas.router.prompts.reader import PromptReader
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    chat,
    local_reader,
    metaspace_tokenizer,
    model_dir,
    read_affinity,
    read_exact,
    say,
)

CHAT = chat(say("user", "Hello"))


def text_of(reader: PromptReader, body: object = CHAT) -> str:
    local = reader.local_model("m")
    tokenizer: Any = local.tokenizer
    text: str = tokenizer._tokenizer.decode(
        list(read_exact(reader, body).token_ids), skip_special_tokens=False
    )
    return text


def test_special_tokens_may_be_text_or_objects_or_in_the_older_file(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, None, unk_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|eot|>"}, "pad_token": "<p>"})
    )
    found = load_model_dir(folder)
    assert found.special_tokens == {"bos_token": "<|eot|>", "eos_token": "<|eos|>", "pad_token": "<p>"}
    assert found.tokenizer.token_to_id("<p>") is not None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    assert load_model_dir(folder).special_tokens["bos_token"] == "<|bos|>"


def test_equal_tokenizers_of_two_directories_are_one(tmp_path: Path) -> None:
    one, same, more = (
        load_model_dir(model_dir(tmp_path / name, template, extra_special_tokens=tokens)).tokenizer
        for name, template, tokens in (("one", None, []), ("same", "chatml", []), ("more", None, ["<more>"]))
    )
    assert same is one
    assert (one.token_to_id("<more>"), more.token_to_id("<more>")) == (None, one.get_vocab_size())
    other = load_model_dir(model_dir(tmp_path / "other", None, tokenizer=byte_level_tokenizer(400)))
    assert other.tokenizer.get_vocab_size() < one.get_vocab_size()


def test_tokens_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    added = {"9001": {"content": "<late>", "lstrip": True, "special": False}, "9000": {"content": "<early>"}}
    folder = model_dir(tmp_path, None, added_tokens_decoder=added, extra_special_tokens=["<more>", "<|eot|>"])
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer, size = load_model_dir(folder).tokenizer, plain.get_vocab_size()
    assert [tokenizer.token_to_id(text) for text in ("<early>", "<late>", "<more>")] == [
        size,
        size + 1,
        size + 2,
    ]
    assert tokenizer.token_to_id("<|eot|>") == plain.token_to_id("<|eot|>")
    assert tokenizer.get_added_tokens_decoder()[size + 1].lstrip


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, "chatml")
    (folder / "chat_template.jinja").write_text("file")
    assert text_of(local_reader(folder)) == "file"
    assert text_of(local_reader(folder, chat_template="given {{ messages[0].content }}")) == "given Hello"
    other = tmp_path / "other.jinja"
    other.write_text("other file")
    assert text_of(local_reader(folder, chat_template=str(other))) == "other file"


def test_named_templates_and_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "rag"},
    ]
    folder = model_dir(tmp_path, None, chat_template=named)
    with_tools = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert text_of(local_reader(folder)) == "plain"
    assert text_of(local_reader(folder), with_tools) == "tools"
    assert text_of(local_reader(folder, chat_template="rag"), with_tools) == "rag"
    none = {**with_tools, "tool_choice": "none"}
    assert text_of(local_reader(folder), none) == "tools"
    assert text_of(local_reader(folder, exclude_tools_when_tool_choice_none=True), none) == "plain"
    (folder / "additional_chat_templates").mkdir()
    for text in ("from a file", "from that file, changed"):  # nothing read before stands in for it
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)
        assert text_of(local_reader(folder), with_tools) == text


def test_a_processors_template_serves_chats_without_tools(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, None, chat_template="tokenizer's")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert text_of(local_reader(folder)) == "tokenizer's"  # no processor: that file is not looked at
    (folder / "preprocessor_config.json").write_text("{}")
    assert text_of(local_reader(folder)) == "processor's"
    tools = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert text_of(local_reader(folder), tools) == "tokenizer's"


@pytest.mark.parametrize("name", ["KimiK3ForConditionalGeneration", "DeepseekV41ForCausalLM"])
def test_models_with_a_renderer_of_their_own_are_left_to_the_engine(tmp_path: Path, name: str) -> None:
    folder = model_dir(tmp_path, "chatml")
    (folder / "config.json").write_text(json.dumps({"architectures": [name]}))
    reader = local_reader(folder)
    assert read_affinity(reader, CHAT).reason == "renderer"
    assert len(read_exact(reader, {"prompt": "Hello"}, "/v1/completions").token_ids) > 0


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = model_dir(tmp_path, "chatml")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = load_model_dir(folder).tokenizer.encode("Hello there, how are you?").ids
    assert len(ids) > 9


def test_a_template_that_looks_like_a_missing_file_is_refused() -> None:
    with pytest.raises(ModelDirError, match="no/such/file"):
        load_chat_template("no/such/file.jinja")
    assert load_chat_template("{{ messages }}") == "{{ messages }}"


def _metaspace(**fields: Any) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False, **fields}


ALWAYS, NEVER = _metaspace(prepend_scheme="always"), _metaspace(prepend_scheme="never")
NFC = {"normalizer": {"type": "NFC"}}


@pytest.mark.parametrize(
    ("name", "model_type", "changes", "config", "same"),
    [
        ("LlamaTokenizerFast", "llama", {"pre_tokenizer": _metaspace()}, {}, True),
        ("LlamaTokenizer", "llama", {"pre_tokenizer": ALWAYS}, {"legacy": True}, True),
        ("LlamaTokenizer", "llama", {"pre_tokenizer": NEVER}, {"add_prefix_space": False}, True),
        ("LlamaTokenizerFast", "llama", {}, {}, False),
        ("LlamaTokenizerFast", "", {}, {}, False),
        ("LlamaTokenizerFast", "llama", {"pre_tokenizer": _metaspace()}, {"legacy": True}, False),
        ("LlamaTokenizerFast", "llama", {"pre_tokenizer": _metaspace(split=True)}, {}, False),
        ("LlamaTokenizerFast", "llama", {"pre_tokenizer": _metaspace()} | NFC, {}, False),
        ("LlamaTokenizerFast", "deepseek_v3", {}, {}, True),
        ("PreTrainedTokenizerFast", "llama", {}, {}, True),
    ],
)
def test_a_tokenizer_that_engines_build_otherwise_is_left_to_them(
    name: str, model_type: str, changes: dict[str, Any], config: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    """transformers 5.19: of 25 pairs of class and model type, those whose tokens were equal are the same."""
    file = json.loads(metaspace_tokenizer() if "pre_tokenizer" in changes else byte_level_tokenizer())
    folder = model_dir(
        tmp_path, "chatml", tokenizer=json.dumps(file | changes), tokenizer_class=name, **config
    )
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    made = local_reader(folder)
    if same:
        assert read_exact(made, CHAT).token_ids
        assert read_exact(made, {"prompt": "x"}, "/v1/completions").token_ids
    else:
        assert read_affinity(made, CHAT).reason == "tokenizer_class"
        assert read_affinity(made, {"prompt": "x"}, "/v1/completions").reason == "tokenizer_class"
