"""vLLM's own OffloadingConnector on our host memory and transfers, in a real server: what is loaded gives the
same tokens and log-probabilities to the last bit."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.served_connectors import all_stored, serve, stored_blocks
from tests.connectors.e2e.shared_servers import complete, same
from tests.vllm.tiny_model import write_tiny_model
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (70, 200, 513, 1200)


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(tokens)]


@pytest.fixture(scope="module", params=[1, 2], ids=["blocks", "chunks of two"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("spec")
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "connectors.offload_spec",
            "host_bytes": "64MiB",
            "blocks_per_chunk": request.param,
        },
    }
    with serve(write_tiny_model(folder / "model"), folder, transfer) as running:
        complete(running.base_url, prompt(99, 40))
        yield running


def test_loaded_equals_computed(engine: VllmEngine) -> None:
    url = engine.base_url
    cold = {n: complete(url, prompt(n, n)) for n in LENGTHS}
    all_stored(engine, prompt(7, 40))
    for n in LENGTHS:
        loaded = complete(url, prompt(n, n))
        assert same(loaded, cold[n]), n
        if n > 150:
            assert loaded["cached"] > n // 2
    held = stored_blocks(engine)
    assert {medium for medium, _ in held} == {"CPU"}
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        metrics = response.read().decode()
    loads = [line for line in metrics.splitlines() if line.startswith("vllm:kv_offload_load_bytes_total{")]
    assert loads
    assert float(loads[0].rpartition(" ")[2]) > 0
