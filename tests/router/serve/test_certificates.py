"""A certificate that is renewed under a running ``kvatlas serve``, alone and with workers."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.router.serve.test_reload import AWAY, Serving
from tests.support.pki import make_authority, make_certificate
from tests.support.waiting import until
from tests.support.whole_router import MODEL, running

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
KINDS = {"crt": "tls_cert_file", "key": "tls_key_file"}


def shows(router: Serving, folder: Path, name: str) -> bool:
    """Whether every one of several new connections, which any worker may get, is shown this certificate."""
    wanted = ssl.PEM_cert_to_DER_cert((folder / f"{name}.crt").read_text())
    shown = (ssl.get_server_certificate(("127.0.0.1", router.port)) for _ in range(8 * router.workers))
    return all(ssl.PEM_cert_to_DER_cert(text) == wanted for text in shown)


async def chat(router: Serving, session: aiohttp.ClientSession) -> int:
    url = f"https://127.0.0.1:{router.port}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with session.post(url, json=body) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_renewed_certificate_is_shown_after_sighup_and_without(tmp_path: Path, workers: int) -> None:
    make_authority(tmp_path)
    for name in ("first", "second"):
        make_certificate(tmp_path, name)

    def renew(name: str) -> None:
        for kind in KINDS:
            shutil.copy(tmp_path / f"{name}.{kind}", tmp_path / f"used.{kind}")

    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    router = Serving(tmp_path, workers)
    files = "".join(f'{key} = "{tmp_path}/used.{kind}"\n' for kind, key in KINDS.items())
    async with (
        running({}) as engines,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, limit=1)) as session,
    ):
        router.engines = [engines[0].base_url]
        renew("first")
        router.write("one", server=files)
        await router.start()
        try:
            await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)
            assert shows(router, tmp_path, "first")
            assert await chat(router, session) == 200

            renew("second")
            router.hup()
            await until(lambda: shows(router, tmp_path, "second"), lambda: router.log[-3000:])
            assert await chat(router, session) == 200, "on the connection from before"

            renew("first")  # without a signal: the files are watched
            await until(lambda: shows(router, tmp_path, "first"), lambda: router.log[-3000:])

            (tmp_path / "used.crt").write_text("half a certificate")
            router.hup()
            await router.counts("unchanged", 2)
            assert shows(router, tmp_path, "first")
            assert "certificate not renewed" in router.log
        finally:
            assert await router.stop() == 0, router.log
