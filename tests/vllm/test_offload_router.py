"""The router before real vLLM engines with kvatlas connectors: what would be loaded is predicted, by medium.

Two scenarios: host memory of each engine's own (``HybridOffloadConnector``), and a store of files that both
share (``SharedStoreConnector``). The GPU pools are small, so that most of what is found again is found
outside them. Requests go one at a time, as in ``test_router_end_to_end``; vLLM's own counters of cached
tokens by source say from where each hit was.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.paths import ROOT
from tests.vllm.chat_load import ChatLoad, Request
from tests.vllm.observed_fleet import BLOCK_TOKENS, EventTap, Fleet, Outcome, running, send
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = 90
NUM_GPU_BLOCKS = 180
"""Six groups share them: two long prompts fill the pool."""
PROMPT_TOKENS = 500
FILLERS_MAX = 40
ENGINE_ARGS = (
    "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--max-num-batched-tokens", "256",
)  # fmt: skip
SOURCES = {"device": "GPU", "host": "CPU", "external_unspecified": "STORAGE"}
"""vLLM's names of where a hit came from."""


@dataclass
class Scene:
    """Two engines with a connector behind the router; ``medium`` is where the connector keeps blocks."""

    fleet: Fleet
    client: openai.OpenAI
    medium: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.fleet.router.ops_url}{path}") as response:
            return json.load(response)

    def explain(self, prompt: list[int]) -> dict[str, dict[str, int]]:
        """Per engine: the predicted tokens by medium."""
        body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
        url = f"{self.fleet.router.ops_url}/kvatlas/explain"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            explained = json.load(response)
        return {
            engine["engine"]: {medium: engine["hit_tokens"][medium] for medium in SOURCES.values()}
            for engine in explained["engines"]
        }

    def send(self, request: Request) -> tuple[Outcome, dict[str, Any], Counter[str]]:
        """Through the router: the outcome, its receipt, and what the engine says it took from where.

        Returns when the router knows all that the request caused.
        """
        before = {engine_id: by_source(engine_id) for engine_id in self.fleet.taps}
        outcome = send(self.client, request)
        request.answered(outcome.text)
        self.fleet.settle(outcome.engine_id)
        taken = by_source(outcome.engine_id) - before[outcome.engine_id]
        return outcome, self.get("/kvatlas/receipts")[-1], taken

    def evict(self, engine_id: str, prompt: list[int]) -> dict[str, int]:
        """Fill this engine's GPU until nothing of ``prompt`` is predicted there; what is predicted then."""
        rng = random.Random(prompt[0])
        with openai.OpenAI(base_url=f"{engine_id}/v1", api_key="none", max_retries=0) as client:
            for _ in range(FILLERS_MAX):
                filler = [rng.randrange(10, 1000) for _ in range(PROMPT_TOKENS)]
                client.completions.create(model="tiny", prompt=filler, max_tokens=1)
                self.fleet.settle(engine_id)
                predicted = self.explain(prompt)[engine_id]
                if not predicted["GPU"]:
                    return predicted
        raise AssertionError("the prompt stayed on the GPU whatever was sent")


def by_source(engine_id: str) -> Counter[str]:
    """Tokens that the engine took from its caches so far, by medium."""
    name = "vllm:prompt_tokens_cached_by_source_total{"
    found: Counter[str] = Counter()
    with urllib.request.urlopen(f"{engine_id}/metrics") as response:
        for line in response.read().decode().splitlines():
            if line.startswith(name):
                source = line.partition('source="')[2].partition('"')[0]
                found[SOURCES.get(source, source)] += int(float(line.rpartition(" ")[2]))
    return found


def engine(
    python: str, model: Path, log: Path, connector: str, module: str, extra: dict[str, Any]
) -> VllmEngine:
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": f"connectors.{module}",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return VllmEngine(
        python,
        model,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        log=log,
        extra_args=(*ENGINE_ARGS, "--kv-transfer-config", json.dumps(transfer)),
        environment={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
    )


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(PROMPT_TOKENS)]


def completion(tokens: list[int], engine_id: str = "") -> Request:
    """``engine_id``: where it goes, whatever the engines have to do meanwhile; else the router chooses."""
    arguments: dict[str, Any] = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "temperature": 0}
    if engine_id:
        arguments["extra_headers"] = {"x-kvatlas-engine": engine_id}
    return Request(arguments, chat=False)


@pytest.fixture(scope="module", params=["host memory", "shared store"])
def scene(
    request: pytest.FixtureRequest,
    vllm_python: str,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    extra: dict[str, Any] = {"pinned_source_blocks_max": 0.5}
    if request.param == "host memory":
        connector, module, medium = "HybridOffloadConnector", "offload", "CPU"
        extra |= {"host_bytes": "4MiB"}  # 512 blocks of 8 KiB: some give way in the mixed load
    else:
        connector, module, medium = "SharedStoreConnector", "shared_store", "STORAGE"
        # One thread stores in order. A look-up may take as long as a busy machine makes it.
        extra |= {"host_bytes": "16MiB", "threads": 1, "lookup_deadline_s": 30, "absent_for_s": 0.1}
        extra |= {"store": {"kind": "file", "path": str(folder / "blocks"), "max_bytes": "1GiB"}}
    engines = [
        engine(vllm_python, tiny_model, folder / f"engine{at}.log", connector, module, extra) for at in (0, 1)
    ]
    pinning = ("--set", "proxy.pin_header=true")
    with (
        running(engines, tiny_model, log=folder / "router.log", medium=medium, options=pinning) as fleet,
        openai.OpenAI(base_url=f"{fleet.router.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Scene(fleet, client, medium)


def check_metrics(scene: Scene) -> None:
    """Receipts and metrics show the media; to be called when some hits have been loaded."""
    with urllib.request.urlopen(f"{scene.fleet.router.ops_url}/metrics") as response:
        lines = response.read().decode().splitlines()

    def total(name: str, *labels: str) -> float:
        chosen = [line for line in lines if line.startswith(f"{name}{{") and all(x in line for x in labels)]
        return sum(float(line.rpartition(" ")[2]) for line in chosen)

    medium = f'medium="{scene.medium}"'
    assert total("kvatlas_predicted_hit_medium_tokens_total", medium) > 0
    assert total("kvatlas_predictions_compared_total", medium, 'outcome="exact"') > 0
    assert total("kvatlas_predictions_compared_total", 'outcome="over"') == 0
    assert total("kvatlas_predictions_compared_total", 'outcome="under"') == 0
    assert any(receipt["hit_by_medium"].get(scene.medium) for receipt in scene.get("/kvatlas/receipts"))


def test_evicted_blocks_are_predicted_where_they_can_be_loaded(scene: Scene) -> None:
    tokens = prompt(1)
    first, _, _ = scene.send(completion(tokens))
    home = first.engine_id
    (other,) = scene.fleet.taps.keys() - {home}
    assert first.predicted == first.cached_tokens == 0

    predicted = scene.evict(home, tokens)
    whole = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert predicted == {"GPU": 0, "CPU": 0, "STORAGE": 0} | {scene.medium: whole}
    elsewhere = scene.explain(tokens)[other]
    assert sum(elsewhere.values()) == (whole if scene.medium == "STORAGE" else 0)

    again, receipt, taken = scene.send(completion(tokens, home))
    assert again.predicted == again.cached_tokens == whole
    assert +taken == {scene.medium: whole}
    assert receipt["hit_by_medium"] == predicted
    assert receipt["outcome"] == "exact"


def test_every_predicted_hit_is_what_the_engine_takes_by_medium(scene: Scene) -> None:
    wrong: list[str] = []
    served: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for number, request in enumerate(ChatLoad(seed=5).requests(REQUESTS)):
        outcome, receipt, taken = scene.send(request)
        served[outcome.engine_id] += 1
        used.update(medium for medium, tokens in taken.items() if tokens)
        told = outcome.cached_tokens if outcome.cached_tokens is not None else taken.total()
        if outcome.predicted != told or +Counter(receipt["hit_by_medium"]) != +taken:
            wrong.append(
                f"request {number} on {outcome.engine_id}: predicted {receipt['hit_by_medium']}, "
                f"engine took {dict(taken)}, reported {outcome.cached_tokens} of {outcome.prompt_tokens}"
            )
    taps: dict[str, EventTap] = scene.fleet.taps
    told_of = {e: (dict(tap.stored), dict(tap.removed)) for e, tap in taps.items()}
    print(f"{scene.medium}: served {served}, hits {used}, (stored, removed) {told_of}")
    assert not wrong, f"{len(wrong)} of {REQUESTS} wrong:\n" + "\n".join(wrong[:20])
    assert min(used["GPU"], used[scene.medium]) >= REQUESTS // 8, "too few hits to say anything"
    assert set(served) == set(taps), "one engine served everything"
    assert min(tap.removed["GPU"] for tap in taps.values()) > 100, "hardly anything was evicted"
    if scene.medium == "CPU":
        assert any(tap.removed["CPU"] for tap in taps.values()), "nothing gave way in host memory"
    check_metrics(scene)


def test_the_other_engine_loads_the_computed_blocks(scene: Scene) -> None:
    if scene.medium != "STORAGE":
        pytest.skip("each engine has host memory of its own")
    one, other = scene.fleet.taps
    tokens = prompt(2)
    for engine_id, expected in ((one, 0), (other, (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS)):
        predicted = scene.explain(tokens)[engine_id]
        assert predicted == {"GPU": 0, "CPU": 0, "STORAGE": expected}
        before = by_source(engine_id)
        with openai.OpenAI(base_url=f"{engine_id}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
        scene.fleet.settle(engine_id)
        assert +(by_source(engine_id) - before) == +Counter({"STORAGE": expected})
