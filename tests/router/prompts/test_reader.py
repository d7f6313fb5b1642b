"""Where a prompt's tokens come from: here, an engine, or nowhere; each way exact, counted and bounded."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.block_hash import HashScheme, MultimodalItem, PromptExtras, block_hashes
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.reader import (
    ModelDirError,
    ModelPrompts,
    Prompt,
    PromptReader,
    PromptSettings,
    TextAffinity,
)
from kvatlas.router.prompts.remote import FAILED_S, without_tensors
from kvatlas.router.prompts.settings import REASONS
from tests.support.prompts import cases
from tests.support.prompts.readers import (
    chat,
    local_reader,
    model_dir,
    no_engine,
    read,
    read_affinity,
    read_exact,
    read_prompt,
    reader,
    request,
    say,
)
from tests.support.waiting import run

COMPLETION = "/v1/completions"
IMAGE = say(
    "user", [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "u"}}]
)
HELLO = chat(say("user", "Hello"))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    """One reader for all bodies that leave nothing behind but a count."""
    return local_reader(model_dir(tmp_path_factory.mktemp("chatml"), "chatml"))


class Engine:
    """A fake engine: answers by path, records calls; ``wait`` makes it hang until cancelled."""

    def __init__(self, answers: dict[str, Any], *, wait: bool = False) -> None:
        self.answers = answers
        self.wait = wait
        self.calls: list[tuple[str, bytes]] = []
        self.headers: list[dict[str, str]] = []

    async def post(
        self, url: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        path = url.removeprefix("http://engine")
        self.calls.append((path, body))
        self.headers.append(headers)
        if self.wait:
            await asyncio.Event().wait()
        answer = self.answers.get(path, 404)
        if isinstance(answer, Exception):
            raise answer
        return (answer, b"{}") if isinstance(answer, int) else (200, json.dumps(answer).encode())

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


def engine_reader(engine: Engine, settings: PromptSettings | None = None, **more: Any) -> PromptReader:
    models = more.pop("models", {"m": ModelPrompts()})
    return reader(
        models, settings, post=engine.post, engine_url=lambda _model, _frontend: "http://engine", **more
    )


RENDER = "/v1/chat/completions/render"


def test_an_engine_renders_where_no_tokenizer_is_configured() -> None:
    engine = Engine({RENDER: {"token_ids": [5, 6, 7] * 20, "features": None, "sampling_params": {}}})
    side = engine_reader(engine)
    prompt = read_prompt(side, chat(say("user", "Hello"), cache_salt="s"))
    assert (prompt.source, list(prompt.token_ids)) == ("engine", [5, 6, 7] * 20)
    assert prompt.extras == PromptExtras(cache_salt="s")
    assert prompt.hashes(HashScheme()) == block_hashes([5, 6, 7] * 20, HashScheme(), prompt.extras)
    assert engine.paths == [RENDER]
    assert side.stats.engine == 1
    assert side.stats.not_local["no_tokenizer"] == 1


def test_the_tokenize_endpoint_stands_in_where_render_is_switched_off() -> None:
    now = [100.0]
    engine = Engine({RENDER: 403, "/tokenize": {"tokens": [1, 2], "count": 2, "max_model_len": 9}})
    side = engine_reader(engine, clock=lambda: now[0])
    for _ in range(3):
        prompt = read_prompt(side, HELLO)
        assert list(prompt.token_ids) == [1, 2]
    assert engine.paths == [RENDER, "/tokenize", "/tokenize", "/tokenize"]
    now[0] += 61
    read(side, HELLO)
    assert engine.paths[-2:] == [RENDER, "/tokenize"]


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{"text": "x"}]},
        {"reasoning_effort": "low"},
        {"truncate_prompt_tokens": 3},
        {"tool_choice": "none"},
    ],
)
def test_tokenize_is_not_asked_what_it_does_not_know(fields: dict[str, Any]) -> None:
    engine = Engine({"/tokenize": {"tokens": [1]}})
    read_affinity(engine_reader(engine), chat(say("user", "Hello"), **fields))
    assert engine.paths == [RENDER]


@pytest.mark.parametrize("answer", [OSError("reset"), 500, 400, [1], {"token_ids": "x"}, {"token_ids": [-1]}])
def test_an_engine_that_does_not_help_costs_exactness_only(answer: Any) -> None:
    side = engine_reader(Engine({RENDER: answer, "/tokenize": answer}))
    assert read_affinity(side, HELLO).reason == "no_tokenizer"
    assert side.stats.affinity["no_tokenizer"] == 1
    assert side.stats.engine_failures >= 1


def test_a_failing_engine_is_left_alone_for_a_moment() -> None:
    now = [0.0]
    engine = Engine({RENDER: 500, "/tokenize": 500})
    side = engine_reader(engine, clock=lambda: now[0])
    read(side, HELLO)
    read(side, HELLO)
    assert engine.paths == [RENDER]  # the other endpoint would fail too
    assert side.stats.engine_skipped == 1
    now[0] = 5.1
    read(side, HELLO)
    assert engine.paths == [RENDER, RENDER]


def test_a_slow_engine_is_given_up_within_the_budget() -> None:
    engine = Engine({}, wait=True)
    read_affinity(engine_reader(engine, PromptSettings(engine_timeout_s=0.01)), HELLO)


def test_engine_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.remote.CALLS_MAX", 3)
    engine = Engine({}, wait=True)
    side = engine_reader(engine, PromptSettings(engine_timeout_s=0.05))

    async def burst() -> list[Prompt | TextAffinity]:
        return await asyncio.gather(*(side.read(request(HELLO)) for _ in range(10)))

    assert all(isinstance(found, TextAffinity) for found in run(burst()))
    assert len(engine.calls) == 3
    assert side.stats.engine_skipped == 7


def test_multimodal_prompts_take_item_hashes_from_the_engine(tmp_path: Path) -> None:
    features = {
        "mm_hashes": {"image": ["h2", "h1"], "audio": ["h3"]},
        "mm_placeholders": {
            "image": [{"offset": 30, "length": 9, "is_embed": None}, {"offset": 2, "length": 20}],
            "audio": [{"offset": 40, "length": 4}],
        },
        "kwargs_data": None,
    }
    engine = Engine({RENDER: {"token_ids": list(range(64)), "features": features}})
    models = {"m": ModelPrompts(tokenizer_dir=str(model_dir(tmp_path, "chatml")), lora_paths={"a": "/a"})}
    side = engine_reader(engine, models=models)
    prompt = read_prompt(side, chat(IMAGE))
    items = (MultimodalItem("h1", 2, 20), MultimodalItem("h2", 30, 9), MultimodalItem("h3", 40, 4))
    assert prompt.extras.multimodal == items
    assert json.loads(engine.calls[0][1])["mm_payload"] == "none"
    assert prompt.hashes(HashScheme()) == block_hashes(
        range(64), HashScheme(), PromptExtras(multimodal=items)
    )
    # With an adapter, whether its name is part of the item's identifier is the engine's secret.
    assert read_affinity(side, chat(IMAGE), model="a").reason == "multimodal"


def test_no_engine_is_called_where_a_tokenizer_is_configured(tmp_path: Path) -> None:
    engine = Engine({})
    side = engine_reader(engine, models={"m": ModelPrompts(tokenizer_dir=str(model_dir(tmp_path, "chatml")))})
    for body in (*cases.TURNS, *cases.TOOL_CHATS):
        read(side, body)
    assert side.stats.local > 45
    assert [path for path in engine.paths if side.stats.local == 0] == []
    assert len(engine.calls) <= sum(side.stats.not_local.values()) * 2
    engine.calls.clear()
    read_exact(side, HELLO)
    assert engine.calls == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_prompt_endpoints_are_rendered_by_the_engine(path: str) -> None:
    engine = Engine({f"{path}/render": {"token_ids": [1, 2, 3]}})
    prompt = read_prompt(engine_reader(engine), {"model": "m", "messages": [], "input": "x"}, path)
    assert list(prompt.token_ids) == [1, 2, 3]


def test_unknown_endpoints_go_by_affinity_of_their_bytes() -> None:
    engine = Engine({})
    found = read_affinity(engine_reader(engine), b"any bytes", "/v1/embeddings")
    assert (found.reason, engine.calls) == ("endpoint", [])


def test_models_and_adapters() -> None:
    models = {"m": ModelPrompts(lora_paths={"lora": "/path"})}
    engine = Engine({RENDER: {"token_ids": [1, 2]}})
    side = engine_reader(engine, models=models)
    prompt = read_prompt(side, HELLO, model="lora")
    assert prompt.extras == PromptExtras(lora_name="lora", lora_path="/path")
    for model, reason in (("other", "lora_path_unknown"),):
        assert read_affinity(side, HELLO, model=model).reason == reason
    assert isinstance(read(side, HELLO, model=None), Prompt)  # the only one there is
    anything = engine_reader(engine, models={"*": ModelPrompts()}, is_adapter=lambda name: name == "adapter")
    read_prompt(anything, HELLO, model="whatever")
    assert read_affinity(anything, HELLO, model="adapter").reason == "lora_path_unknown"
    nothing = engine_reader(engine, models={})
    assert read_affinity(nothing, HELLO).reason == "model_unknown"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (chat(IMAGE), "multimodal"),
        (chat(say("user", [{"type": "video_url", "video_url": {"url": "x"}}])), "multimodal"),
        (chat(say("user", [{"type": "prompt_embeds", "data": "x"}])), "embeds"),
        (chat(say("user", [{"type": "text", "text": "x", "uuid": "u"}])), "message_shape"),
        (chat(say("user", [{"type": "hologram"}])), "message_shape"),
        (chat(say("user", [5])), "message_shape"),
        (chat(say("assistant", "x", reasoning=5)), "message_shape"),
        (chat(say("assistant", "x", tool_calls=[{"id": "1", "type": "custom"}])), "message_shape"),
        (chat(say("developer", "x", tools=[])), "message_shape"),
        (chat(say("user", "x"), tools=[]), "tools_shape"),
        (
            chat(say("user", "x"), tools=[{"type": "function", "function": {"name": "f", "strict": 1}}]),
            "tools_shape",
        ),
        (chat(say("user", "x"), chat_template="{{ 1 }}"), "request_template"),
        (chat(say("user", "x"), chat_template_kwargs={"tokenize": True}), "template_kwargs"),
        (chat(say("user", "x"), chat_template_kwargs={"messages": []}), "template_kwargs"),
        (chat(say("user", "x"), chat_template_kwargs=[1]), "field"),
        (chat(say("user", "x"), add_generation_prompt=1), "field"),
        (chat(say("user", "x"), add_special_tokens="yes"), "field"),
        (chat(say("user", "x"), documents=[{"text": 5}]), "field"),
        (chat(say("user", "x"), cache_salt=5), "field"),
        (chat(say("user", "x"), kv_transfer_params={"prompt_token_ids": [1]}), "field"),
        (chat(say("user", "x"), continue_final_message=True), "template_rejected"),
        (chat(say("user", "x" * 99), truncate_prompt_tokens=-1), "truncation"),
        (chat(say("user", "x" * 99), truncate_prompt_tokens=3, truncation_side="left"), "truncation"),
        (chat(say("user", "x"), truncate_prompt_tokens="3"), "field"),
        (chat(), "template_rejected"),
    ],
)
def test_unreproducible_prompts_are_never_guessed(chatml: PromptReader, body: Any, reason: str) -> None:
    not_local, affinity = chatml.stats.not_local[reason], chatml.stats.affinity[reason]
    assert read_affinity(chatml, body).reason == reason
    assert chatml.stats.not_local[reason] - not_local == chatml.stats.affinity[reason] - affinity == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x", "suffix": "y"}, "field"),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, "embeds"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({}, "empty"),
        ({"prompt": [5000000000]}, "field"),
        ({"prompt": "a b c d e f g h", "truncate_prompt_tokens": 0}, "empty"),
    ],
)
def test_completions_that_cannot_be_reproduced(chatml: PromptReader, body: Any, reason: str) -> None:
    assert read_affinity(chatml, body, COMPLETION).reason == reason


def test_several_prompts_are_routed_by_the_first_and_say_so(tmp_path: Path) -> None:
    side = local_reader(model_dir(tmp_path, None))
    assert read_exact(side, {"prompt": ["one", "two", "three"]}, COMPLETION).num_prompts == 3
    assert list(read_exact(side, {"prompt": [[4, 5], [6]]}, COMPLETION).token_ids) == [4, 5]
    assert side.stats.multi_prompt == 2
    assert read(side, HELLO) == TextAffinity(read(side, HELLO).keys, "no_template")  # type: ignore[union-attr]


def test_prompt_log_probabilities_skip_the_cache(tmp_path: Path) -> None:
    side = local_reader(model_dir(tmp_path, "chatml"))
    assert not read_exact(side, HELLO).skips_cache
    assert read_exact(side, {**HELLO, "prompt_logprobs": 0}).skips_cache
    assert read_exact(side, {**HELLO, "echo": True}).skips_cache
    assert not read_exact(side, {"prompt": "x", "echo": True}, COMPLETION).skips_cache
    assert read_exact(side, {"prompt": "x", "echo": True, "logprobs": 1}, COMPLETION).skips_cache


def test_the_number_of_answers_is_read(tmp_path: Path) -> None:
    side = local_reader(model_dir(tmp_path, "chatml"))
    assert [read_exact(side, {**HELLO, "n": n}).num_answers for n in (None, 1, 3, 0, "x")] == [1, 1, 3, 1, 1]
    # As pydantic reads whole numbers, and so vLLM.
    for given, wanted in (("128", 128), (128.0, 128), (" +1_28.0 ", 128), (True, 1), (2.5, 1), ("1e2", 1)):
        assert read_exact(side, {**HELLO, "n": given}).num_answers == wanted
        assert read_exact(side, {"prompt": "x", "n": given}, COMPLETION).num_answers == wanted
    assert read_exact(side, {"prompt": "x", "n": 2}, COMPLETION).num_answers == 2
    side.close()


def test_bodies_over_the_limit_and_a_full_queue_go_by_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.reader.WORKER_QUEUE_LEN_MAX", 1)
    monkeypatch.setattr("kvatlas.router.prompts.local_model.INLINE_CHARS_MAX", 0)
    folder = model_dir(tmp_path, "chatml")
    side = local_reader(folder, PromptSettings(prompt_bytes_max=1000))
    assert read_affinity(side, chat(say("user", "x" * 2000))).reason == "too_large"
    side = local_reader(folder)

    async def burst() -> list[Prompt | TextAffinity]:
        return await asyncio.gather(*(side.read(request(chat(say("user", f"{n} " * 500)))) for n in range(8)))

    found_all = run(burst())
    busy = [one for one in found_all if isinstance(one, TextAffinity) and one.reason == "busy"]
    assert len(busy) == side.stats.worker_full == 7


def test_models_can_be_replaced_and_unchanged_ones_keep_their_caches(tmp_path: Path) -> None:
    folder = model_dir(tmp_path / "a", "chatml")
    config = ModelPrompts(tokenizer_dir=str(folder))
    side = reader({"m": config})
    kept = side.local_model("m")
    other = ModelPrompts(tokenizer_dir=str(model_dir(tmp_path / "b", "turns")))
    run(side.set_models({"m": config, "n": other, "o": ModelPrompts()}))
    assert side.local_model("m") is kept
    assert read_exact(side, HELLO, model="n").token_ids != read_exact(side, HELLO, model="m").token_ids
    run(side.set_models({"m": other}))
    assert side.local_model("m") is not kept


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "tokenizer.json: no such file"),
        ({"tokenizer.json": "{"}, "tokenizer.json: "),
        ({"tekken.json": "{}"}, "tekken.json"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: not a JSON object"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: "),
        ({"chat_template.jinja": "{% if %}"}, "no valid Jinja"),
    ],
)
def test_an_unusable_directory_is_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    if problem.startswith(("tokenizer_config", "no valid")):
        model_dir(tmp_path, "chatml")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelDirError, match=re.escape(problem)):
        local_reader(tmp_path)


def test_every_request_is_counted_once(tmp_path: Path) -> None:
    side = local_reader(model_dir(tmp_path, "brackets"))
    bodies = [*cases.TURNS, *cases.TOOL_CHATS, chat(5), chat(IMAGE)]
    for body in bodies:
        try:
            read(side, body)
        except ApiError:
            continue
    stats = side.stats
    assert stats.local + stats.engine + stats.refused + sum(stats.affinity.values()) == len(bodies)
    assert set(stats.affinity) == set(REASONS)


def test_without_tensors_keeps_the_request() -> None:
    assert json.loads(without_tensors(b' {"a": 1}')) == {"mm_payload": "none", "a": 1}
    assert json.loads(without_tensors(b"{ }")) == {"mm_payload": "none"}
    assert json.loads(without_tensors(b'{"mm_payload": "tensors"}'))["mm_payload"] == "tensors"


def test_a_reader_without_an_engine_never_calls_one() -> None:
    read_affinity(reader({"m": ModelPrompts()}, post=no_engine), HELLO)


def test_an_engine_is_asked_in_the_clients_name_or_in_nobodys() -> None:
    engine = Engine({RENDER: 403, "/tokenize": {"tokens": [1, 2]}})
    side = engine_reader(engine)
    asked = request(HELLO)
    run(side.read(asked))
    assert engine.headers == [{}, {}]
    asked.headers = [(b"authorization", b"Bearer c\xe9"), (b"cookie", b"x")]
    run(side.read(asked))
    assert engine.headers[2:] == [{"authorization": "Bearer c\xe9"}]


@pytest.mark.parametrize(
    "useless", [{}, [], "x", {"tokens": []}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": None}]
)
def test_a_tokenize_endpoint_that_answers_something_useless_rests(useless: Any) -> None:
    now = [100.0]
    engine = Engine({RENDER: 404, "/tokenize": useless})
    side = engine_reader(engine, clock=lambda: now[0])
    for _ in range(5):
        read_affinity(side, HELLO)
    assert engine.paths == [RENDER, "/tokenize"]
    assert side.stats.engine_skipped == 2 * 4
    now[0] += FAILED_S + 0.1
    engine.answers["/tokenize"] = {"tokens": [5]}
    read_prompt(side, HELLO)


def test_a_client_cannot_send_an_endpoint_to_rest_with_nothing() -> None:
    engine = Engine({"/v1/completions/render": 404, "/tokenize": {"tokens": []}})
    side = engine_reader(engine)
    for empty in ("", None, []):
        read(side, {"prompt": empty}, "/v1/completions")
    assert engine.paths == []


def test_token_ids_need_no_tokenizer() -> None:
    """No tokens are requested for a prompt that has them."""
    bare = reader({"*": ModelPrompts()})
    ids = list(range(100))
    for fields, wanted, prompts in (
        ({"prompt": ids}, ids, 1),
        ({"prompt": [ids, [1, 2]]}, ids, 2),
        ({"prompt": ids, "truncate_prompt_tokens": 10}, ids[-10:], 1),
        ({"prompt": ids, "truncate_prompt_tokens": 10, "truncation_side": "right"}, ids[:10], 1),
    ):
        found = read_prompt(bare, {"model": "m", **fields}, COMPLETION)
        assert (list(found.token_ids), found.num_prompts, found.source) == (wanted, prompts, "local")
    salted = read_prompt(bare, {"model": "m", "prompt": ids, "cache_salt": "tenant"}, COMPLETION)
    assert salted.extras.cache_salt == "tenant"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "text"}, "no_tokenizer"),
        ({"prompt": ["text"]}, "no_tokenizer"),
        ({"prompt": [1, 2], "suffix": "x"}, "field"),
        ({"prompt": [1, -2]}, "field"),
        ({"prompt": [1, 2], "prompt_embeds": "x"}, "embeds"),
        ({"prompt": [1, 2], "truncate_prompt_tokens": -1}, "truncation"),
        ({"prompt": []}, "empty"),
    ],
)
def test_mixed_prompts_are_tokenized_by_an_engine(fields: dict[str, Any], reason: str) -> None:
    bare = reader({"*": ModelPrompts()})
    assert read_affinity(bare, {"model": "m", **fields}, COMPLETION).reason == reason
