"""SIGHUP to ``kvatlas sidecar``: it reads its configuration again, and is not ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.serve.test_reload import Serving

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


class Beside(Serving):
    """``kvatlas sidecar --config`` of a file that the test writes."""

    command = "sidecar"

    def allow(self, prefill: str) -> None:
        self._path.write_text(
            f'[server]\nport = {self.port}\nops_port = {self.ops}\n[sidecar]\nprefills = ["{prefill}"]\n'
        )


async def test_a_new_configuration_is_taken_and_a_bad_one_is_not(tmp_path: Path) -> None:
    sidecar = Beside(tmp_path, 1)
    sidecar.allow("10.0.0.0/8:8000")
    await sidecar.start()
    try:
        await sidecar.counts("applied", 0)
        sidecar.allow("no port")
        sidecar.hup()
        await sidecar.counts("refused", 1)
        assert "sidecar.prefills" in sidecar.log
        sidecar.allow("10.0.0.0/16:8000")
        sidecar.hup()
        await sidecar.counts("applied", 1)
    finally:
        status = await sidecar.stop()
    assert status == 0, sidecar.log
