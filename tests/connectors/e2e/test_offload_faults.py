"""The offload connector inside a real vLLM server, with loads that lie: what ``test_offload_server`` compares
can fail. Transfers that fail are tested under vLLM's scheduler (``offload/test_real_scheduler.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")
pytest.importorskip("tokenizers", reason="needs tokenizers")

from tests.connectors.e2e.offload_servers import forget, prompt, server
from tests.connectors.e2e.shared_servers import complete
from tests.vllm.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GROUPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def faulty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server, and the file that names the group that is spoilt."""
    folder = tmp_path_factory.mktemp("faulty")
    control = folder / "control"
    control.touch()
    module = "tests.connectors.e2e.faulty_connector"
    with server(model, folder, "FaultyOffloadConnector", module, control=str(control)) as engine:
        complete(engine.base_url, prompt(99, 40))
        yield engine.base_url, control


@pytest.mark.parametrize("group", range(GROUPS))
def test_one_spoilt_group_shows(faulty: tuple[str, Path], group: int) -> None:
    """If a group were not loaded at all, the comparisons would notice."""
    url, control = faulty
    asked = prompt(20 + group, 513)
    cold = complete(url, asked)
    forget(url)
    control.write_text(str(group))
    spoilt = complete(url, asked)
    assert spoilt["cached"] == 512
    assert spoilt["top"] != cold["top"]
    control.write_text("")
    forget(url, connector=True)
