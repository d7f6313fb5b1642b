"""Findings about an engine's cache, its prompts and the probe, each provoked once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.observe.findings import Severity
from kvatlas.router.prompts.families import harmony
from tests.router.tools.doctor.rig import Findings, at, examined, http_server, publishing, server, stored
from tests.support.front import fronting
from tests.support.waiting import run
from tests.support.whole_router import LOCAL, running

PLAIN = ModelConfig()
FULL = GroupSpec(0, "full_attention", 16)


async def heard(
    prepare: Callable[[ZmqPublisher], Any], *, model: ModelConfig = PLAIN, **answers: Any
) -> Findings:
    """Findings about an engine by the stored events of its publisher."""
    async with http_server(server(**answers)) as url:
        with publishing() as publisher:
            prepare(publisher)
            return await examined(at(url, publisher), model=model, seconds=0.1)


def one(**event: Any) -> Callable[[ZmqPublisher], Any]:
    return lambda publisher: publisher.publish([stored(**event)])


def page(**samples: float | str) -> tuple[int, bytes, dict[str, str]]:
    """A metrics page; a text is the labels of an info metric."""
    lines = [
        f"vllm:{name}{{{value}}} 1.0" if isinstance(value, str) else f'vllm:{name}{{engine="0"}} {value}'
        for name, value in samples.items()
    ]
    return 200, "\n".join(lines).encode(), {}


def test_prefix_caching_that_is_off() -> None:
    off = page(cache_config_info='block_size="16",enable_prefix_caching="False",engine="0"')
    found = run(heard(one(), metrics=off))
    found.expect("cache.prefix_caching", Severity.ERROR, "off")
    on = page(cache_config_info='enable_prefix_caching="True"')
    run(heard(one(), metrics=on)).expect("cache.prefix_caching", Severity.OK)


@pytest.mark.long
def test_an_unknown_hash_function() -> None:
    """The whole search for a seed is gone through: hashes that no scheme makes."""
    strange = one(hashes=[1])
    found = run(heard(strange))
    found.expect("cache.scheme", Severity.WARNING, "was not found", "PYTHONHASHSEED")
    old = run(heard(strange, version={"version": "0.24.0"}))
    old.expect("cache.scheme", Severity.WARNING, "vLLM 0.24.0 has a random seed")
    xxhash = page(cache_config_info='prefix_caching_hash_algo="xxhash"')
    run(heard(strange, metrics=xxhash)).expect("cache.scheme", Severity.WARNING, "xxhash has a random seed")


def test_a_scheme_not_shown_yet() -> None:
    found = run(heard(one(parent_block_hash=5)))
    found.expect("cache.scheme", Severity.INFO, "not known yet", "--probe")


async def test_a_numeric_seed_is_found_and_told() -> None:
    async with running({"hash_seed": "42"}) as (engine,):
        found = await examined(engine.base_url, probe=True)
        found.expect("cache.scheme", Severity.OK, "PYTHONHASHSEED=42")
        found.expect("probe.exact", Severity.OK, "exact")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_whether_an_engine_obeys_a_salt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kind": kind, "groups": "full"}
    async with running(settings) as (engine,):
        found = await examined(engine.base_url, probe=True)
        found.expect("probe.salt", Severity.OK, "took nothing from the cache")
    async with running({**settings, "drops_salt": "/v1/responses"}) as (engine,):
        found = await examined(engine.base_url, probe=True)
        found.expect("probe.salt", Severity.ERROR, "POST /v1/responses drops cache_salt", "keys.isolate")
    monkeypatch.setattr("kvatlas.publisher.simulator.model.PromptExtras", lambda cache_salt: NO_EXTRAS)
    async with running(settings) as (engine,):
        found = await examined(engine.base_url, probe=True)
        found.expect("probe.salt", Severity.ERROR, "POST /v1/completions drops cache_salt", "keys.isolate")


def test_an_attention_chunk_that_is_not_configured() -> None:
    chunked = one(kv_cache_spec_kind="chunked_local_attention", group_idx=1)
    run(heard(chunked)).expect("cache.facts", Severity.ERROR, "attention_chunk_size", "config.json")
    told = run(heard(chunked, model=ModelConfig(attention_chunk_size=64)))
    assert told.of("cache.facts") == []


@pytest.mark.parametrize(
    ("configured", "said", "words"), [(None, None, "is not set"), ("all", "align", "the configuration 'all'")]
)
def test_an_unknown_mamba_mode(configured: str | None, said: str | None, words: str) -> None:
    answers = {} if said is None else {"metrics": page(cache_config_info=f'mamba_cache_mode="{said}"')}
    model = ModelConfig(mamba_cache_mode=configured)
    found = run(heard(one(kv_cache_spec_kind="mamba", group_idx=1), model=model, **answers))
    found.expect("cache.facts", Severity.WARNING, words)


def test_a_mamba_mode_that_the_engine_states() -> None:
    states = one(kv_cache_spec_kind="mamba", group_idx=1)
    found = run(heard(states, metrics=page(cache_config_info='mamba_cache_mode="align"')))
    assert found.of("cache.facts") == []
    found.expect("cache.sources", Severity.OK, 'mamba_cache_mode = "align" (metrics, certain)')


def with_file(folder: Path, **content: Any) -> ModelConfig:
    """A configured directory whose ``config.json`` says this."""
    shutil.copytree(DEMO_TOKENIZER_DIR, folder)
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(tokenizer=str(folder))


def test_config_json_beside_the_events(tmp_path: Path) -> None:
    model = with_file(
        tmp_path / "model",
        sliding_window=128,
        layer_types=["sliding_attention"],
        attention_chunk_size=64,
        num_nextn_predict_layers=1,
    )
    window = one(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=32)
    run(heard(window, model=model)).expect("cache.groups", Severity.WARNING, "[32]", "128")
    unnamed = one(kv_cache_spec_kind=None)
    run(heard(unnamed, model=model)).expect("cache.groups", Severity.INFO, "config.json: sliding_window")
    chunked = one(kv_cache_spec_kind="chunked_local_attention")
    found = run(heard(chunked, model=model))
    assert Severity.ERROR not in {finding.severity for finding in found.of("cache.facts")}
    drafts = page(spec_decode_num_drafts_total=7)
    found = run(heard(one(), metrics=drafts, model=model))
    assert found.of("cache.facts") == []
    found.expect("cache.sources", Severity.OK, 'eagle_groups = "all" (config.json, likely)')


@pytest.mark.long
def test_speculation_without_a_marked_group() -> None:
    drafts = page(spec_decode_num_drafts_total=7.0)
    found = run(heard(one(), metrics=drafts))
    found.expect("cache.facts", Severity.INFO, "all groups", "eagle_groups")
    stated = {"vllm_config": {"cache_config": {"block_size": 16}, "speculative_config": {"method": "ngram"}}}
    known = run(heard(one(), metrics=drafts, server_info=stated))
    assert known.of("cache.facts") == []
    known.expect("cache.sources", Severity.OK, "eagle_groups = [] (server_info, certain)")
    told = run(heard(one(), metrics=drafts, model=ModelConfig(eagle_groups=(0,))))
    assert told.of("cache.facts") == []
    # From 0.33 on, hashes look ahead, but not with a KV connector: the events tell, not the version.
    newer = {"version": "0.33.0"}
    ahead = run(heard(one(lookahead_token_ids=[[16]]), metrics=drafts, version=newer))
    assert ahead.of("cache.facts") == []
    connector = run(heard(one(), metrics=drafts, version=newer))
    connector.expect("cache.facts", Severity.INFO, "KV connector", "eagle_groups")


WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64, "group_idx": 1}


def test_retention_and_its_effect() -> None:
    def masked(publisher: ZmqPublisher) -> None:
        publisher.publish([stored(tokens=64, hashes=[9], **WINDOW), stored(tokens=32, hashes=[], **WINDOW)])

    found = run(heard(masked))
    found.expect(
        "cache.retention", Severity.INFO, "0 spans completely, 1 partially, 1 without a block", "4096"
    )


def test_large_windows_are_left_at_the_default_as_the_readme_says() -> None:
    def masked(publisher: ZmqPublisher) -> None:
        large = {**WINDOW, "kv_cache_spec_sliding_window": 1024}
        publisher.publish([stored(tokens=64, hashes=[9], **large), stored(tokens=32, hashes=[], **large)])

    run(heard(masked)).expect("cache.retention", Severity.OK, "0 spans completely, 1 partially")


def test_an_engine_that_keeps_everything_though_the_configuration_says_not() -> None:
    def dense(publisher: ZmqPublisher) -> None:
        publisher.publish([stored(**WINDOW) for _ in range(30)])

    run(heard(dense)).expect("cache.retention", Severity.WARNING, "keep everything", '"dense"')
    told = run(heard(dense, model=ModelConfig(retention_interval="dense")))
    told.expect("cache.retention", Severity.OK, "30 spans completely")


def test_a_retention_interval_that_the_engine_contradicts() -> None:
    said = page(cache_config_info='prefix_cache_retention_interval="4096"')
    found = run(heard(one(**WINDOW), metrics=said, model=ModelConfig(retention_interval=0)))
    found.expect("cache.retention", Severity.WARNING, "is 4096", "retention_interval = 4096")
    dense = page(cache_config_info='prefix_cache_retention_interval="None"')
    found = run(heard(one(**WINDOW), metrics=dense, model=ModelConfig(retention_interval=0)))
    found.expect("cache.retention", Severity.WARNING, '= "dense"')


def test_a_retention_interval_that_the_engine_states_needs_no_setting() -> None:
    said = page(cache_config_info='prefix_cache_retention_interval="4096"')
    found = run(heard(one(**WINDOW), metrics=said))
    assert not [one for one in found.of("cache.retention") if one.severity is Severity.WARNING]
    found.expect("cache.sources", Severity.OK, "retention_interval = 4096 (metrics, certain)")


@pytest.mark.parametrize(
    ("mean", "severity"), [(10.0, Severity.WARNING), (40.0, Severity.INFO), (900.0, Severity.OK)]
)
def test_blocks_and_typical_prompts(mean: float, severity: Severity) -> None:
    metrics = page(request_prompt_tokens_sum=mean * 20, request_prompt_tokens_count=20.0)
    found = run(heard(one(), metrics=metrics))
    found.expect("cache.block_size", severity, "16 tokens", f"{mean:.0f} on average")


def test_prompts_that_can_never_hit_are_named_before_any_was_served() -> None:
    found = run(heard(one(tokens=1120, block_size=1120)))
    found.expect("cache.block_size", Severity.INFO, "1120 tokens", "prompts of up to 1120 tokens never hit")


@pytest.mark.long
def test_adapters_without_a_known_path() -> None:
    """Their hashes are of no scheme without the path, so the whole search is gone through."""
    models = {
        "data": [
            {"id": "m"},
            {"id": "known", "parent": "m", "root": "/lora/known"},
            {"id": "served", "parent": "m"},
        ]
    }
    found = run(heard(one(lora_name="heard"), models=models))
    assert "adapter(s) heard, served" in found.expect("cache.lora", Severity.WARNING, "lora_paths").seen
    paths = ModelConfig(lora_paths={"heard": "/h", "served": "/s"})
    run(heard(one(lora_name="heard"), models=models, model=paths)).expect("cache.lora", Severity.OK)


async def test_another_chat_template_than_the_engines(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    config = tmp_path / "other" / "tokenizer_config.json"
    if config.exists():
        fields = json.loads(config.read_text())
        fields.pop("chat_template", None)
        config.write_text(json.dumps(fields))
    model = ModelConfig(tokenizer=str(tmp_path / "other"))

    async with running({}) as (engine,):
        found = await examined(engine.base_url, model=model)
        found.expect("tokens.parity", Severity.ERROR, "chat:", "chat template")
        found.expect("tokens.parity", Severity.OK, "completion")


async def test_another_date_than_the_engines(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "other")
    template = "{{ strftime_now('%H') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "other" / "chat_template.jinja").write_text(template)

    async with running({}) as (engine,):
        found = await examined(engine.base_url, model=ModelConfig(tokenizer=str(tmp_path / "other")))
        found.expect("tokens.parity", Severity.ERROR, "chat:", "a different date", "models.NAME.time_zone")
        found.expect("tokens.parity", Severity.INFO, "time zone", "models.NAME.time_zone")
        model = ModelConfig(tokenizer=str(tmp_path / "other"), time_zone="UTC")
        found = await examined(engine.base_url, model=model)
        found.expect("tokens.parity", Severity.ERROR, "here in time zone UTC")
        assert not [one for one in found.of("tokens.parity") if "of the router's time zone" in str(one)]


async def test_another_tokenizer_than_the_engines(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["model"]["merges"] = fields["model"]["merges"][:50]
    file.write_text(json.dumps(fields))

    async with running({}) as (engine,):
        model = ModelConfig(tokenizer=str(tmp_path / "other"))
        found = await examined(engine.base_url, model=model, probe=True)
        found.expect("tokens.parity", Severity.ERROR, "completion:", "a different tokenizer")
        found.expect("probe.exact", Severity.ERROR, "tokens here", "tokens.parity")


async def test_an_engine_without_tokenize() -> None:
    async with running({}) as (engine,), fronting(engine) as front:
        front.overrides["/tokenize"] = lambda: (404, {})
        found = await examined(at(front.base_url, engine.publisher))  # type: ignore[arg-type]
        found.expect("tokens.parity", Severity.INFO, "no endpoint")
        assert len(found.of("tokens.parity")) == 1
        front.overrides["/tokenize"] = lambda: (200, {"x": 1})
        found = await examined(front.base_url)
        found.expect("tokens.parity", Severity.INFO, "a response without tokens")


async def test_a_template_that_cannot_be_used_here(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "none")
    config = tmp_path / "none" / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop("chat_template", None)
    config.write_text(json.dumps(fields))
    (tmp_path / "none" / "chat_template.jinja").unlink(missing_ok=True)

    async with running({}) as (engine,):
        found = await examined(engine.base_url, model=ModelConfig(tokenizer=str(tmp_path / "none")))
        found.expect("tokens.parity", Severity.WARNING, "cannot be tokenized here", "no_template")


def usage(prompt_tokens: int, cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}}


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"architectures": ["KimiK3ForConditionalGeneration"]}, "--renderer"),
        ({"model_type": "gpt_oss"}, "pip install '.[harmony]'"),
    ],
)
async def test_chats_that_only_code_renders(
    config: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harmony, "library", None)
    shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))

    async with running({}) as (engine,):
        found = await examined(engine.base_url, model=ModelConfig(tokenizer=str(tmp_path)))
        found.expect("tokens.family", Severity.WARNING, remedy)
        assert not (await examined(engine.base_url)).of("tokens.family")


@pytest.mark.parametrize(
    ("answer", "check", "severity", "words"),
    [
        ((200, usage(600, None)), "tokens.usage", Severity.WARNING, "--enable-prompt-tokens-details"),
        ((500, {}), "probe.exact", Severity.ERROR, "status 500"),
        ((200, [1]), "probe.exact", Severity.ERROR, "not a completion"),
        ((0, {}), "probe.exact", Severity.ERROR, "POST /v1/completions"),
    ],
)
async def test_a_probe_that_fails(
    answer: tuple[int, Any], check: str, severity: Severity, words: str
) -> None:
    async with running({}) as (engine,), fronting(engine) as front:
        front.overrides["/v1/completions"] = lambda: answer
        found = await examined(front.base_url, probe=True)
        found.expect(check, severity, words)


async def test_a_hit_that_was_not_foreseen() -> None:
    """The engine keeps a drafter's block rule that the configuration denies: it reports less than is
    resident. Without a setting its metrics tell of the drafter."""

    async with running({"groups": (msgspec.structs.replace(FULL, is_eagle=True),)}) as (engine,):
        denied = msgspec.structs.replace(LOCAL, eagle_groups=())
        found = await examined(engine.base_url, model=denied, probe=True)
        found.expect("probe.exact", Severity.ERROR, "predicted", "a setting of the model is missing")
        for model in (LOCAL, msgspec.structs.replace(LOCAL, eagle_groups=(0,))):
            found = await examined(engine.base_url, model=model, probe=True)
            found.expect("probe.exact", Severity.OK, "exact")


@pytest.mark.long
async def test_nothing_reused() -> None:
    limits = {"groups": "full", "block_size": 512, "max_model_len": 400}
    async with running(limits) as (engine,):
        found = await examined(engine.base_url, probe=True)
        assert found.worst("probe.exact") is Severity.WARNING
