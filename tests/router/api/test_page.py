"""The status page in a real browser, and the JSON that it shows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.key_file import KeySettings, digest_of
from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from tests.support.browser import browsing
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running

TOKEN = "a-token-of-the-ops-port"
EVIL = "<img src=x onerror='window.hacked=1'>"
CONTRAST = """(() => {
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = text => text.match(/[0-9.]+/g).slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const styled = (node, name) => light(getComputedStyle(node)[name]);
  const texts = ['good', 'bad', 'warn', 'soft', ''].map(name => {
    const probe = document.createElement('p');
    probe.className = name;
    document.body.append(probe);
    const found = styled(probe, 'color');
    probe.remove();
    return found;
  });
  texts.push(styled(document.querySelector('#done a'), 'color'));
  const places = [document.body, document.querySelector('.tile')];
  const grounds = places.map(node => styled(node, 'backgroundColor'));
  const ratio = (x, y) => (Math.max(x, y) + .05) / (Math.min(x, y) + .05);
  return Math.min(...texts.flatMap(text => grounds.map(ground => ratio(text, ground))));
})()"""
"""Least contrast of the page's texts, by WCAG 2.2's formula."""
CUT = """[...document.querySelectorAll('#done td')].some(e => e.getBoundingClientRect().right > innerWidth)
  && !document.querySelector('#done .more')"""
"""A table is cut without a sign."""
LOGIN = """document.getElementById('token').value = '{}';
document.getElementById('login').requestSubmit()"""

pytestmark = pytest.mark.real  # a browser


async def used(rig: Rig, *engines: SimulatedEngine) -> None:
    """Requests with a common beginning, all answered; each knows what those before it left in the caches."""
    for number in range(8):
        await rig.chat(TEXT * 40 + str(number))
        await until(lambda: rig.idle, "request over")
        await rig.caught_up(*engines)


async def test_json_of_requests_prefixes_and_problems() -> None:
    gone = EngineAddress("http://127.0.0.1:9")
    async with running({}) as engines, routing(configure(*engines, gone), wait=False) as rig:
        await until(lambda: rig.router.readiness().ready, "one engine is ready")
        await used(rig, *engines)
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


async def test_json_of_answers_and_history() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        began_s = time.time()
        await used(rig, *engines)
        await rig.ask("POST", "/v1/chat/completions", {"model": "none", "messages": []})
        _, answers = await rig.ask("GET", "/kvatlas/answers")
        assert [one["status"] for one in answers] == ["200"] * 8 + ["404"]
        first = answers[0]
        assert began_s - 1 <= first["at_s"] <= time.time() + 1
        assert (first["model"], first["engine"], first["tenant"]) == (MODEL, engines[0].base_url, "")
        assert (first["attempts"], first["completion_tokens"]) == (1, 3)
        for asked in (first["request_id"], first["request_id"][:12], f"chatcmpl-{first['request_id']}"):
            for page in ("answers", "receipts"):
                _, (found,) = await rig.ask("GET", f"/kvatlas/{page}?request_id={asked}")
                assert found["request_id"] == first["request_id"]
        assert await rig.ask("GET", "/kvatlas/answers?request_id=unknown") == (200, [])
        _, history = await rig.ask("GET", "/kvatlas/history")
        total = {name: sum(one[name] for one in history["intervals"]) for name in ("requests", "compared")}
        assert total == {"requests": 9, "compared": 8}
        assert sum(one["hit_tokens"] for one in history["intervals"]) == sum(
            one["cached_tokens"] for one in answers[:8]
        )
        assert history["intervals"][-1]["engines_up"] == 1


async def test_errors_are_in_the_history_and_503_among_them() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        await used(rig, *engines)
        await engines[0].stop()
        await until(lambda: not any(engine.up for engine in rig.router.fleet), "it is down")
        with pytest.raises(openai.InternalServerError):
            await rig.chat(TEXT)
        _, history = await rig.ask("GET", "/kvatlas/history")
        names = ("requests", "errors", "unavailable")
        assert [sum(one[name] for one in history["intervals"]) for name in names] == [9, 1, 1]
        assert history["intervals"][-1]["engines_up"] == 0


async def test_in_a_browser_wide_narrow_dark_and_by_keyboard() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig, browsing() as tab:
        await used(rig, *engines)
        await tab.open(f"{rig.ops_url}/")
        await tab.shows("#state", "ready")
        assert await tab.js("document.getElementById('state').className") == "good"
        await tab.shows("#engines", "up")
        await tab.shows("#engines", "blocks held, full attention")
        await tab.shows("#done", "exact")
        await tab.shows("#tree", "256 tokens")
        await tab.shows("#data", "data of ")
        assert TEXT[:30] not in await tab.text("body")
        tiles = await tab.text("#tiles")
        for text in ("1 of 1", "Requests/s", "Errors", "503s", "Cache hit share", "Exact share", "100 %"):
            assert text in tiles
        charts = "[...document.querySelectorAll('#tiles svg')].map(e => e.getAttribute('aria-label'))"
        unnamed = "[...document.querySelectorAll('th,dt,.tile > span:first-child')].filter(e => !e.title "
        unnamed += "&& !e.querySelector('[title]')).map(e => e.innerText)"
        shown = await tab.js(unnamed)
        assert shown == []
        labels = await tab.js(charts)
        assert len(labels) == 7
        assert "Exact share, last five minutes: lowest 100 %, highest 100 %" in labels
        assert await tab.js("document.querySelectorAll('h1').length") == 1
        controls = "[...document.querySelectorAll('button,input,textarea')]"
        assert await tab.js(f"{controls}.filter(e => !e.textContent && !e.labels?.length).length") == 0
        assert await tab.js("getComputedStyle(document.getElementById('login')).display") == "none"
        for width in (360, 768, 1280):
            await tab.size(width)
            assert await tab.js("document.documentElement.scrollWidth <= window.innerWidth"), width
            high = "[...document.querySelectorAll('#engines dd')].map(e => e.offsetHeight)"
            assert max(await tab.js(high)) < 60, "values stand beside their names, not one letter a line"
            assert not await tab.js(CUT), width
        colours = []
        for scheme in ("light", "dark"):
            await tab.prefer(scheme)
            colours.append(await tab.js("getComputedStyle(document.querySelector('.good')).color"))
            assert await tab.js(CONTRAST) >= 4.5, "WCAG 2.2, 1.4.3 (AA)"
        assert colours[0] != colours[1]
        await tab.press("Tab")
        assert await tab.js("document.activeElement.id") == "pause"
        await tab.press("Enter")
        assert await tab.js("document.activeElement.getAttribute('aria-pressed')") == "true"
        await tab.shows("#data", "paused")
        assert tab.errors == []


@pytest.mark.long
async def test_a_request_is_found_with_its_receipt_and_explained() -> None:
    gone = EngineAddress("http://127.0.0.1:9")
    async with (
        running({}) as engines,
        routing(configure(*engines, gone), wait=False) as rig,
        browsing() as tab,
    ):
        await until(lambda: rig.router.readiness().ready, "one engine is ready")
        await used(rig, *engines)
        _, receipts = await rig.ask("GET", "/kvatlas/receipts")
        sought = receipts[3]
        await tab.open(f"{rig.ops_url}/kvatlas/#request={sought['request_id'][:10]}")
        await tab.shows("#found", sought["request_id"])
        await tab.shows("#found", "/v1/chat/completions")
        worst = await tab.text("#engines li")
        assert "down" in worst
        assert "%" not in worst, "nothing is shown of an engine that is down"
        assert "exact" in await tab.text("#found table")
        await tab.js("document.getElementById('request').value = 'nothing-like-it'")
        await tab.js("document.getElementById('find').requestSubmit()")
        await tab.shows("#found", "No request with this id")
        await tab.js(f"document.querySelector('#done a[href$=\"{sought['request_id']}\"]').click()")
        await tab.shows("#found", sought["request_id"])
        await tab.js("document.querySelector('#found button').click()")
        assert await tab.js("document.activeElement.id") == "body"
        assert await tab.js("JSON.parse(document.getElementById('body').value).model") == MODEL
        await tab.js("document.getElementById('explain').requestSubmit()")
        await tab.shows("#explained", "Goes to")
        assert engines[0].base_url.removeprefix("http://") in await tab.text("#explained table")
        await tab.js("document.getElementById('body').value = '{'")
        await tab.js("document.getElementById('explain').requestSubmit()")
        await tab.shows("#explained", "Not valid JSON")
        assert tab.errors == []


@pytest.mark.long
async def test_many_engines_are_a_table_with_the_worst_first() -> None:
    gone = [EngineAddress(f"http://127.0.0.1:{port}") for port in range(1, 63)]
    async with running({}, {}) as engines, browsing() as tab:
        config = configure(engines[0], *gone, engines[1])
        async with routing(config, wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "one engine is ready")
            await used(rig, *engines)
            await tab.open(f"{rig.ops_url}/kvatlas/")
            await tab.shows("#state", "62 errors")
            assert await tab.js("document.getElementById('state').className") == "warn"
            assert "2 of 64" in await tab.text("#tiles")
            assert f"{MODEL}: 2 up" in await tab.text("#engines > ul")
            assert "no model yet: 62 down" in await tab.text("#engines > ul")
            assert "all 2 engines" in await tab.text("#engines > details summary")
            rows = "document.querySelectorAll('#engines tbody td[data-name=state]').length"
            assert await tab.js(rows) == 50, "the rest on demand"
            await tab.js("document.querySelector('#engines > button').click()")
            states = "[...document.querySelectorAll('#engines td[data-name=state]')].map(e => e.innerText)"
            assert await tab.js(states) == ["down"] * 62 + ["up"] * 2
            dead = "[...document.querySelectorAll('#engines tr.noted')].map(e => e.innerText).join()"
            assert "%" not in await tab.js(dead), "nothing is shown of an engine that is down"
            for way in ("ascending", "descending"):
                await tab.js("document.querySelector('#engines th:first-child button').focus()")
                await tab.press("Enter")
                sorted_ = "document.querySelector('#engines th:first-child').getAttribute('aria-sort')"
                assert await tab.js(sorted_) == way
                assert await tab.js("document.activeElement.innerText") == "engine"
            await tab.js("document.querySelector('#engines th:nth-child(7) button').click()")
            await tab.size(360)
            assert await tab.js("document.documentElement.scrollWidth <= window.innerWidth")
            stacked = "getComputedStyle(document.querySelector('#engines td:nth-child(2)'), '::before')"
            assert "state" in await tab.js(f"{stacked}.content"), "each value has its name"
            await tab.size(700)
            sign = "getComputedStyle(document.querySelector('#engines .scroll'), '::before').content"
            assert "more columns" in await tab.js(sign)
            assert tab.errors == []


@pytest.mark.long
async def test_without_engines_and_a_router_that_goes_away() -> None:
    async with browsing() as tab:
        config = configure(server=ServerConfig(port=0, ops_port=free_port()))
        async with routing(config, wait=False) as rig:
            await tab.open(f"{rig.ops_url}/kvatlas/")
            await tab.shows("#state", "not ready: no engine answers yet")
            await tab.shows("#engines", "No engines")
            await tab.shows("#tiles", "0 of 0")
            await tab.shows("#done", "None yet")
            await tab.shows("#sessions", "No request named its session")
            assert await tab.js("document.getElementById('banner').hidden")
            failed = [error for error in tab.errors if "503" not in error]  # /ready
            assert failed == []
        await tab.shows("#banner", "The router does not answer. This page shows data of ")
        await tab.shows("#data", "second")
        assert await tab.js("document.getElementById('state').className") == "bad"
        async with routing(config, wait=False):
            await tab.shows("#state", "not ready")
            assert await tab.js("document.getElementById('banner').hidden")


@pytest.mark.long
async def test_names_from_outside_are_text(tmp_path: Path) -> None:
    """None becomes markup or a script; those of tenants are checked when the key file is read."""
    file = tmp_path / "keys.toml"
    tenant = "tenants-are-shown"
    file.write_text(f'[tenants."{tenant}"]\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of("a-key")}"\n')

    keys = KeySettings(file=str(file))
    async with routed({"model": EVIL}, keys=keys) as (rig, engines), browsing() as tab:
        for model in (EVIL, "</script><script>window.hacked=1</script>"):
            body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "model": model}
            url, headers = (
                f"{rig.url}/v1/chat/completions",
                {"x-request-id": EVIL, "x-session-id": EVIL, "authorization": "Bearer a-key"},
            )
            async with rig.session.post(url, json=body, headers=headers) as answer:
                assert answer.status == (200 if model == EVIL else 404)
        await tab.open(f"{rig.ops_url}/kvatlas/")
        await tab.shows("#engines", EVIL)
        await tab.shows("#done", EVIL)
        await tab.shows("#done", "</script>")
        await tab.shows("#done", tenant)
        for text in (EVIL, tenant, " on " + engines[0].base_url.removeprefix("http://")):
            await tab.shows("#sessions", text)
        await tab.js("document.querySelector('#done a').click()")
        await tab.shows("#found", EVIL)
        assert await tab.js("document.querySelectorAll('img').length") == 0
        assert await tab.js("window.hacked") is None
        assert tab.errors == []
        # Should a later change make markup of texts, the browser refuses it (trusted types).
        markup = "document.getElementById('found').innerHTML = '<b>b</b>'"
        assert await tab.js(f"try {{ {markup}; 'taken' }} catch {{ 'refused' }}") == "refused"


async def test_with_tokens_the_page_asks_for_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    async with running({}) as engines, browsing() as tab:
        config = configure(*engines)
        server = msgspec.structs.replace(config.server, ops_token_file=str(file))
        async with routing(msgspec.structs.replace(config, server=server)) as rig:
            await tab.open(f"{rig.ops_url}/")
            await tab.shows("#state", "a token is needed")
            assert "up" not in await tab.text("#engines")
            await tab.js(LOGIN.format("another-token-than-this"))
            await tab.shows("#state", "this token is not accepted")
            refused = [error for error in tab.errors if "401" in error]
            assert len(refused) == 2, "a wrong token is tried once"
            asked = "performance.getEntriesByType('resource').length"
            before = await tab.js(asked)
            await tab.js("loop()")  # as every two seconds
            assert await tab.js(asked) == before, "nothing is asked until there is another token"
            await tab.js(LOGIN.format(TOKEN))
            await tab.shows("#engines", "up")
            await tab.js("document.querySelector('footer a').click()")
            await tab.shows("#raw", "kvatlas_requests_total")


@pytest.mark.parametrize("path", ["/", "/kvatlas"])
async def test_the_ops_port_leads_to_the_page(path: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)

    config = configure()
    server = msgspec.structs.replace(config.server, ops_token_file=str(file))
    async with routing(msgspec.structs.replace(config, server=server), wait=False) as rig:
        for method in ("GET", "HEAD"):
            ask = rig.session.request(method, rig.ops_url + path, allow_redirects=False)
            async with ask as answer:
                assert (answer.status, answer.headers["location"]) == (307, "kvatlas/")
        async with rig.session.get(rig.ops_url + path) as answer:
            assert (answer.status, answer.url.path) == (200, "/kvatlas/")
        async with rig.session.get(rig.url + path) as answer:
            assert answer.status == 404, "not on the public port"


@pytest.mark.parametrize("path", ["/kvatlas/", "/kvatlas/requests", "/kvatlas/answers", "/kvatlas/history"])
async def test_nothing_of_it_on_the_public_port(path: str) -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        address = rig.url + path
        async with rig.session.get(address) as answer:
            body: Any = await answer.json()
        assert (answer.status, body["error"]["code"]) == (404, "ops_port")


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        address = f"{rig.ops_url}/kvatlas/"
        async with rig.session.get(address) as answer:
            html = await answer.text()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http://" not in html
        assert "https://" not in html
