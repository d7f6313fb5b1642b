"""The operators' page in a real browser, and the JSON that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.fleet.identity import EngineAddress
from tests.support.browser import browsing
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

TOKEN = "a-token-of-the-ops-port"


async def used(rig: Rig) -> None:
    """Requests with a common beginning, all answered."""
    for number in range(8):
        await rig.chat(TEXT * 40 + str(number))
        await until(lambda: rig.idle, "request over")


def test_json_of_requests_prefixes_and_problems() -> None:
    async def main() -> None:
        gone = EngineAddress("http://127.0.0.1:9")
        async with running({}) as engines, routing(configure(*engines, gone), wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "one engine is ready")
            await used(rig)
            await rig.caught_up(*engines)
            status, problems = await rig.ask("GET", "/kvatlas/problems")
            assert status == 200
            assert problems[engines[0].base_url] == []
            (down,) = problems[gone.base_url]
            assert down["severity"] == "error"
            assert down["remedy"]
            _, prefixes = await rig.ask("GET", "/kvatlas/prefixes")
            first = prefixes[0]
            assert (first["tokens"], first["parent"], first["model"]) == (256, "", MODEL)
            assert first["rate"] > 3
            assert list(first["holders"]) == [engines[0].base_url]
            assert {p["parent"] for p in prefixes if p["tokens"] > 256} == {
                p["id"] for p in prefixes if any(q["parent"] == p["id"] for q in prefixes)
            }
            stream = await rig.api.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": TEXT * 40}],
                max_tokens=100_000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(stream)
            _, (live,) = await rig.ask("GET", "/kvatlas/requests")
            assert (live["model"], live["engine"], live["stage"]) == (MODEL, engines[0].base_url, "streaming")
            assert live["why"]["predicted_hit_tokens"] > 0
            assert live["why"]["reason"] == "only"
            await stream.close()
            await until(lambda: not rig.router.proxy.requests.live, "nothing is live")
            _, document = await rig.ask("GET", "/kvatlas/openapi.json")
            assert {"/kvatlas/problems", "/kvatlas/requests", "/kvatlas/prefixes"} <= set(document["paths"])

    run(main())


def test_in_a_browser_wide_narrow_dark_and_by_keyboard() -> None:
    async def main() -> None:
        async with running({}) as engines, routing(configure(*engines)) as rig, browsing() as tab:
            await used(rig)
            await rig.caught_up(*engines)
            await tab.open(f"{rig.ops_url}/kvatlas/")
            await tab.shows("#state", "ready")
            await tab.shows("#engines", "up")
            await tab.shows("#engines", "blocks in group 0")
            await tab.shows("#done", "exact")
            await tab.shows("#tree", "256 tokens")
            assert TEXT[:30] not in await tab.text("body")
            assert await tab.js("document.querySelectorAll('h1').length") == 1
            controls = "[...document.querySelectorAll('button,input')]"
            assert await tab.js(f"{controls}.filter(e => !e.innerText && !e.labels?.length).length") == 0
            assert await tab.js("getComputedStyle(document.getElementById('login')).display") == "none"
            for width in (360, 1280):
                await tab.size(width)
                assert await tab.js("document.documentElement.scrollWidth <= window.innerWidth"), width
                high = "[...document.querySelectorAll('dd')].map(e => e.offsetHeight)"
                assert max(await tab.js(high)) < 60, "values stand beside their names, not one letter a line"
            colours = []
            for scheme in ("light", "dark"):
                await tab.prefer(scheme)
                colours.append(await tab.js("getComputedStyle(document.documentElement).colorScheme"))
                colours.append(await tab.js("getComputedStyle(document.querySelector('.good')).color"))
            assert colours[1] != colours[3]
            await tab.press("Tab")
            assert await tab.js("document.activeElement.id") == "pause"
            await tab.press("Enter")
            assert await tab.js("document.activeElement.getAttribute('aria-pressed')") == "true"
            assert tab.errors == []

    run(main())


def test_with_tokens_the_page_asks_for_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)

    async def main() -> None:
        async with running({}) as engines, browsing() as tab:
            config = configure(*engines)
            server = msgspec.structs.replace(config.server, ops_token_file=str(file))
            async with routing(msgspec.structs.replace(config, server=server)) as rig:
                await tab.open(f"{rig.ops_url}/kvatlas/")
                await tab.shows("#state", "a token is needed")
                assert "up" not in await tab.text("#engines")
                await tab.js(f"document.getElementById('token').value = '{TOKEN}'")
                await tab.js("document.getElementById('login').requestSubmit()")
                await tab.shows("#engines", "up")

    run(main())


@pytest.mark.parametrize("path", ["/kvatlas/", "/kvatlas/requests", "/kvatlas/prefixes"])
def test_nothing_of_it_on_the_public_port(path: str) -> None:
    async def main() -> None:
        async with running({}) as engines, routing(configure(*engines)) as rig:
            address = rig.url + path
            async with rig.session.get(address) as answer:
                body: Any = await answer.json()
            assert (answer.status, body["error"]["code"]) == (404, "ops_port")

    run(main())


def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async def main() -> None:
        async with running({}) as engines, routing(configure(*engines)) as rig:
            address = f"{rig.ops_url}/kvatlas/"
            async with rig.session.get(address) as answer:
                html = await answer.text()
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "http://" not in html
            assert "https://" not in html

    run(main())
