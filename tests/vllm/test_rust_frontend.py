"""Prompts behind vLLM's Rust frontend, compared with ``vllm-rs render``, and a fleet with both frontends.

The binary is in the wheel of vLLM 0.33 (scripts/vllm_overlay_env.sh).
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.settings import ModelPrompts
from tests.support.paths import ROOT
from tests.support.ports import free_port, free_ports
from tests.support.prompts import cases
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    chat,
    model_dir,
    read,
    reader,
    say,
    template_text,
)
from tests.support.waiting import wait_until
from tests.vllm.router_process import RouterProcess
from tests.vllm.test_prompts_match_vllm import MODELS, TINY_LLAMA
from tests.vllm.vllm_engine import VllmEngine, VllmServer, answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TEMPLATES: dict[str, str] = {
    **{name: template_text(name) for name in dict.fromkeys(spec["template"] for spec in MODELS.values())},
    "json": "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson if tools else '' }}",
    "indented": "{% for m in messages %}{{ m | tojson(indent=2) }}{% endfor %}",
    "items": "{% for m in messages %}{% for k, v in m | items %}{{ k }},{% endfor %}{% endfor %}",
    "sorted": "{% for m in messages %}{% for k, v in m | dictsort %}{{ k }};{% endfor %}{% endfor %}",
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p | tojson }}{% endfor %}{% endfor %}",
    "printed": "{{ messages }}",
    "joined": "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ loop.index }}{% endfor %}",
    "list": "{{ [1, 'a'] }} {{ range(3) | list }}",
    "values": "{{ add_generation_prompt }} {{ true }} {{ none }} {{ messages | length }}",
    "number": "{{ 1.5 }}{{ 4 / 2 }}",
    "case": "{% for m in messages %}{{ m.content | upper }}{{ m.role.title() }}{% endfor %}",
    "text": "{% for m in messages %}{{ m.content.split('\\n')[-1] }}|{{ m.content.strip() }}|"
    "{{ m.content[:5] }}{% endfor %}",
    "defined": "{% if tools is defined %}T{% endif %}{% if documents is defined %}D{% endif %}"
    "{% for m in messages %}{% if m.name is defined %}n{% endif %}"
    "{% if m.tool_calls is defined %}t{% endif %}"
    "{% if m.reasoning is defined %}r{% endif %}{{ m.tool_call_id }}{% endfor %}",
    "calls": "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c | tojson }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
    "{% endfor %}{% endfor %}",
    "switches": "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].role }}",
}
ARGUMENTS = (
    '{"a": 1.0}', '{"a": 0.1}', '{"a": true, "b": null, "c": "\\u00e9\\u0001\\u2028<&>"}',
    '{"z": 1, "a": {"y": [1]}}',
    '{"a": 9007199254740993}', '"text"', "null", "3", '{"a": 1, "a": 2}',
    '{"a": 1e400}', '{"a": 1e-7}', '{"a": -0.0}',
)  # fmt: skip
BODIES: list[dict[str, Any]] = [
    *cases.TURNS,
    *cases.TOOL_CHATS,
    *cases.random_chats(40, seed=11),
    *[
        chat(say("user", "go"), say("assistant", "", tool_calls=[cases.call("f", one)]), cases.RESULT)
        for one in ARGUMENTS
    ],
    *[chat(say("user", "a"), reasoning_effort=effort) for effort in ("low", "medium", "minimal")],
    chat(say("user", "a"), say("assistant", "x", reasoning="")),
    chat(say("user", "a"), say("assistant", "x", tool_calls=[cases.call("f", "{}")], reasoning_content="r")),
    chat(say("user", [{"type": "text", "text": ""}]), say("assistant", [{"type": "text", "text": "p"}] * 2)),
    chat(say("user", []), say("user", None), say("system", "late"), say("user", "x")),
    chat(say("developer", "d", tools=cases.TOOLS), say("user", "x")),
    chat(say("user", "a"), tools=[], tool_choice="none"),
    chat(
        say("user", "a"), tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": 1e20}}}]
    ),
]


@pytest.fixture(scope="module")
def python_033() -> str:
    python = os.environ.get("KVATLAS_VLLM_033_PYTHON", "")
    if not python:
        pytest.skip("KVATLAS_VLLM_033_PYTHON names no interpreter with vLLM 0.33; make test-vllm sets it")
    return python


@pytest.fixture(scope="module")
def binary(python_033: str) -> Path:
    return found_binary(python_033)


def found_binary(python: str) -> Path:
    """``vllm-rs``, which the wheel's unpacking leaves without its mode."""
    found = next((Path(python).parent.parent / "lib").glob("python*/site-packages/vllm/vllm-rs"))
    found.chmod(0o755)
    return found


@contextmanager
def rendering(binary: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    words = [
        "render",
        str(folder),
        "--port",
        str(port),
        "--served-model-name",
        "m",
        "--tool-call-parser",
        "hermes",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *words], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), "vllm-rs answers")
        yield url
    finally:
        process.kill()
        process.wait()


def ask(url: str, path: str, body: Any) -> Any:
    """The decoded answer; None where it is refused."""
    return ask_raw(url, path, json.dumps(body).encode())


def ask_raw(url: str, path: str, body: bytes) -> Any:
    """The same for a body that is encoded already."""
    asked = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        return None


def test_every_local_prompt_is_that_of_the_rust_frontend(binary: Path, tmp_path: Path) -> None:
    wrong, local, rendered = [], 0, 0
    for name, template in TEMPLATES.items():
        folder = model_dir(tmp_path / name, None, tokenizer=byte_level_tokenizer())
        (folder / "chat_template.jinja").write_text(template)
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
        models = {"m": ModelPrompts(tokenizer_dir=str(folder), max_model_len=4096)}
        rust = reader(models, frontends=lambda _model: ("rust",))
        with rendering(binary, folder) as url:
            for body in BODIES:
                answer = ask(url, f"{CHAT}/render", body)
                try:
                    found = read(rust, body)
                except ApiError:
                    continue
                rendered += answer is not None
                if answer is not None and isinstance(found, Prompt):
                    local += 1
                    if list(found.token_ids) != answer["token_ids"]:
                        wrong.append((name, json.dumps(body)))
            for fields in cases.COMPLETIONS:
                body = {"model": "m", **fields}
                answers_ = ask(url, f"{COMPLETION}/render", body)
                found = read(rust, body, COMPLETION)
                if answers_ is not None and isinstance(found, Prompt):
                    assert list(found.token_ids) == answers_[0]["token_ids"], fields
        rust.close()
    assert not wrong, wrong[:5]
    print(f"{local} of {rendered} prompts are made here, all equal")
    assert local > 0.6 * rendered


def test_a_fleet_with_both_frontends_is_exact(
    vllm_python: str, python_033: str, binary: Path, tiny_model: Path, tmp_path: Path
) -> None:
    http, events, replay = free_ports(3)
    url = f"http://127.0.0.1:{http}"
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    words = [
        "tests.vllm.rust_server",
        "serve",
        str(tiny_model),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(http),
        "--load-format",
        "dummy",
        "--enforce-eager",
        "--block-size",
        "16",
        "--max-model-len",
        "2048",
        "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override",
        "400",
        "--kv-events-config",
        json.dumps(published),
    ]
    environment = {"VLLM_USE_RUST_FRONTEND": "1", "PYTHONPATH": str(ROOT)}
    rust = VllmServer(
        python_033, words, base_url=url, log=tmp_path / "rust.log", environment=environment, forked=False
    )
    python = VllmEngine(vllm_python, tiny_model, num_gpu_blocks=400, log=tmp_path / "python.log")
    parts = [{"type": "text", "text": f"lime tovu gado {n} " * 20} for n in range(3)]
    body = {"model": "tiny", "messages": [say("user", parts)], "max_tokens": 2}
    with ExitStack() as stack:
        rust.start()
        python.start()
        stack.enter_context(python)
        stack.callback(rust.stop)
        rust.wait_until_healthy()
        urls = [python.base_url, url]
        router = stack.enter_context(
            RouterProcess(
                urls, tiny_model, log=tmp_path / "router.log", options=("--set", "proxy.pin_header=true")
            )
        )
        for engine in urls:
            router.wait_until_up(engine)
            for turn in range(2):
                asked = urllib.request.Request(
                    f"{router.base_url}{CHAT}",
                    json.dumps(body).encode(),
                    {"content-type": "application/json", "x-kvatlas-engine": engine},
                )
                with urllib.request.urlopen(asked) as answer:
                    json.load(answer)
                if not turn:
                    wait_until(partial(held, router, body, engine), "its blocks are known")
        receipts = router.receipts()
    assert [one["outcome"] for one in receipts] == ["exact"] * 4
    assert sorted(one["actual_tokens"] > 0 for one in receipts) == [False, False, True, True]
    assert len({one["prompt_tokens"] for one in receipts}) == 2


def held(router: RouterProcess, body: dict[str, Any], engine: str) -> int:
    """Tokens of the prompt that this engine is predicted to hold."""
    explained = router.explain(body)["engines"]
    return int(next(one["hit_tokens"]["GPU"] for one in explained if one["engine"] == engine))
