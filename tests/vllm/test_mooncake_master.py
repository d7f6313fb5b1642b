"""The master of Mooncake's released wheel, behind vLLM's own connector: the router follows its list of keys.

One engine: what its GPU forgot it loads from the store. Requests go one at a time, and before each the router
has read a list of keys that it asked for when all was stored and removed that is to be known.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import openai
import pytest

from tests.connectors.e2e.offload_servers import forget, prompt
from tests.connectors.store.mooncake_kit import Service
from tests.support.paths import ROOT
from tests.support.waiting import wait_until
from tests.vllm.observed_fleet import BLOCK_TOKENS, Fleet, running
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GROUPS = 6  # of the tiny model's layers

# A client that removes the keys it is given, and answers each with a status.
REMOVER = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", sys.argv[1], 0, 1 << 24, "tcp", "", sys.argv[2]) == 0
for line in sys.stdin:
    print("removed", client.remove(line.strip(), True), file=sys.stderr, flush=True)
"""


class Scene:
    """An engine, its store and the router; ``remover``: input and output of ``REMOVER``."""

    def __init__(self, fleet: Fleet, master: Service, remover: tuple[IO[str], IO[str]]) -> None:
        self._fleet, self._master, self._remover = fleet, master, remover
        (self.engine_id,) = fleet.taps

    def keys(self) -> list[str]:
        """All keys, by the master's own list."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._master.http_port}/get_all_keys") as answer:
            return sorted(answer.read().decode().split())

    def remove(self, key: str) -> None:
        asked, told = self._remover
        asked.write(f"{key}\n")
        asked.flush()
        while not (line := told.readline()).startswith("removed "):
            assert line, "the client that removes keys has ended"
        assert line == "removed 0\n"

    def chunks(self) -> int:
        """The router's count, when it has read a list that it asked for after all before."""
        self._fleet.settle(self.engine_id)
        wanted = self._store()["batches"] + 2
        wait_until(lambda: self._store()["batches"] >= wanted, "two lists of keys")
        seen = self._store()
        assert seen["unused"] == {}
        return int(seen["chunks"])

    def send(self, tokens: list[int]) -> tuple[int, int]:
        """Through the router, which knows all before: tokens predicted from the store, and the hit, which
        must be the one predicted."""
        self.chunks()
        url = f"{self._fleet.router.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        self._fleet.settle(self.engine_id)
        receipt = self._fleet.router.receipts()[-1]
        assert receipt["outcome"] == "exact", receipt
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        hit = usage.prompt_tokens_details.cached_tokens or 0
        assert receipt["predicted_tokens"] == hit
        return receipt["storage_tokens"], hit

    def stored_by(self, tokens: list[int]) -> list[str]:
        """Keys of the one chunk more that the engine stores for ``tokens``, one per group."""
        self.chunks()
        before = set(self.keys())
        with openai.OpenAI(base_url=f"{self.engine_id}/v1", api_key="none", max_retries=0) as client:
            client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        wait_until(lambda: len(set(self.keys()) - before) == GROUPS, "the chunk in the store")
        return sorted(set(self.keys()) - before)

    def _store(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._fleet.router.ops_url}/kvatlas/stores") as answer:
            (seen,) = json.load(answer)
        return dict(seen)


@pytest.fixture(scope="module")
def scene(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    words = [vllm_python, "-c", "import mooncake.store; print(mooncake.store.__file__)"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"needs Mooncake, which scripts/vllm_env.sh installs: {found.stderr[-300:]}")
    folder = tmp_path_factory.mktemp("mooncake")
    with ExitStack() as stack:
        master = Service(Path(found.stdout.strip()).with_name("mooncake_master"))
        stack.callback(master.close)
        engine = engine_at(master, vllm_python, tiny_model, folder)
        config = folder / "kvatlas.toml"
        config.write_text(
            f'[[stores]]\nname = "pool"\nkind = "mooncake"\nmodel = "tiny"\nkey_model = "{tiny_model.name}"\n'
            f'keys_url = "http://127.0.0.1:{master.http_port}"\nkeys_every_s = 0.5\n'
        )
        remover = stack.enter_context(
            subprocess.Popen(
                [vllm_python, "-c", REMOVER, master.settings.metadata, master.settings.master],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(remover.kill)
        fleet = stack.enter_context(
            running(
                [engine],
                tiny_model,
                log=folder / "router.log",
                medium="cpu",  # as the connector calls its store
                options=("--config", str(config)),
            )
        )
        yield Scene(fleet, master, cast("tuple[IO[str], IO[str]]", (remover.stdin, remover.stderr)))


def engine_at(master: Service, python: str, model: Path, folder: Path) -> VllmEngine:
    settings, told = master.settings, folder / "mooncake.json"
    told.write_text(
        json.dumps(
            {
                "metadata_server": settings.metadata,
                "master_server_address": settings.master,
                "protocol": settings.protocol,
                "global_segment_size": settings.segment_bytes,
                "local_buffer_size": settings.buffer_bytes,
            }
        )
    )
    transfer = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_module_path": "tests.vllm.mooncake_on_cpu",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    sizes = ("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048")
    return VllmEngine(
        python,
        model,
        num_gpu_blocks=400,
        log=folder / "engine.log",
        extra_args=(*sizes, "--kv-transfer-config", json.dumps(transfer)),
        environment={
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "MOONCAKE_CONFIG_PATH": str(told),
        },
    )


@pytest.mark.parametrize("length", [10, 33, 64, 500])
def test_chunks_of_the_connector_are_predicted(scene: Scene, length: int) -> None:
    tokens = prompt(length, length)
    whole = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert scene.send(tokens) == (0, 0)
    assert scene.send(tokens) == (0, whole), "the GPU has it"
    forget(scene.engine_id)
    assert scene.send(tokens) == (whole, whole)


def test_removed_chunks_are_not_promised(scene: Scene) -> None:
    tokens = prompt(100, 300)
    forget(scene.engine_id, connector=True)
    chunks = [scene.stored_by(tokens[: end + 1]) for end in range(BLOCK_TOKENS, 300, BLOCK_TOKENS)]
    for index, keys in reversed([*enumerate(chunks)]):
        for key in keys:
            scene.remove(key)
        forget(scene.engine_id)
        before = index * BLOCK_TOKENS
        assert scene.send(tokens) == (before, before)
    there = scene.keys()
    assert scene.chunks() >= len(there)


def test_a_store_that_was_emptied_is_empty(scene: Scene) -> None:
    tokens = prompt(1, 400)
    scene.send(tokens)
    forget(scene.engine_id, connector=True)
    assert scene.keys() == []
    assert scene.send(tokens) == (0, 0)
    forget(scene.engine_id)
    assert scene.send(tokens) == (384, 384)
