"""The sidecar before a simulated decode engine: right answers whatever fails, and nobody asked who may not
be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.simulator.model import WRONG_MARK
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import Config, ServerConfig
from kvatlas.router.fleet.settings import FileSettings, FleetSettings
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.settings import PdSettings, PdStats, SidecarSettings, hint_field
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.sidecar import Allowed, SidecarPlacer, check, reloads_of
from tests.router.app.test_engine_order import watched
from tests.router.serve.test_reload import Serving
from tests.support.examples import examples
from tests.support.front import Front, fronting
from tests.support.pairs import CONNECTORS, connected
from tests.support.ports import free_port
from tests.support.sidecars import completion, endpoint, sidecar
from tests.support.waiting import until
from tests.support.whole_router import MODEL, running

P: dict[str, Any] = {"role": "prefill"}
D: dict[str, Any] = {"role": "decode"}
TEXT = "Once upon a time there was a sidecar that asked two engines for one answer. " * 20


def words(answer: dict[str, Any]) -> Any:
    choices = answer.get("choices") or answer["content"]
    return msgspec.json.decode(msgspec.json.encode(choices))


async def alone(body: dict[str, Any], path: str = "/v1/completions") -> Any:
    async with running({}) as (engine,), sidecar(engine, "p:1") as beside:
        status, answer, told = await beside.ask(body, path=path)
        assert (status, told) == (200, None), answer
        return words(answer)


async def test_the_answer_is_that_of_one_engine_and_says_who_computed_the_prompt() -> None:
    expected = await alone(completion(1))
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        status, answer, told = await beside.ask(completion(1), endpoint(p))
        assert (status, words(answer), told) == (200, expected, "0 0")
        longer = {**completion(1), "prompt": completion(1)["prompt"] + completion(2, 300)["prompt"]}
        _, answer, told = await beside.ask(longer, endpoint(p))
        assert told == f"0 {answer['usage']['prompt_tokens_details']['cached_tokens']}"
        assert told != "0 0"
        stats = beside.sidecar.pd_stats
        assert (stats.split, stats.handoffs, stats.aggregated) == (2, 2, {})


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_and_streams(stream: bool) -> None:
    body = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": TEXT}]}
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        asked = {**body, "stream": stream}
        status, answer, told = await beside.ask(asked, endpoint(p), path="/v1/chat/completions")
        assert (status, told) == (200, "0 0")
        if stream:
            assert answer.endswith("data: [DONE]\n\n")
        assert WRONG_MARK not in str(answer)


async def test_without_the_field_the_engine_is_asked_alone() -> None:
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        status, _, told = await beside.ask(completion(1))
        assert (status, told) == (200, None)
        assert beside.sidecar.pd_stats.aggregated == {"local": 1}
        pages = {"/health": "", "/metrics": "vllm:", "/version": "0.", "/v1/models": MODEL}
        for path, part in pages.items():
            status, text = await beside.get(path)
            assert (status, part in text) == (200, True), path
        status, _ = await beside.get("/server_info")
        assert status == 403


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_priority_that_a_picker_gave_reaches_the_engine(path: str) -> None:
    asked = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": TEXT}]}
    async with running({**D, "scheduling_policy": "priority"}) as (d,), sidecar(d, "p:1") as beside:
        seen = watched(d)
        status, _, _ = await beside.ask(asked, path=path, **{"x-vllm-priority": "1234567890123"})
        assert (status, seen) == (200, [1_234_567_890_123])


def params_at(front: Front) -> list[Any]:
    """``kv_transfer_params`` of the requests that it got."""
    return [msgspec.json.decode(body).get("kv_transfer_params") for _, body in front.bodies]


RETENTION_HINT = {"ttl_s": 9.0, "value": 0.5, "owner": "ab"}


def signed(secret: bytes, *, own: bool = True, prefill: bool = True) -> dict[str, str]:
    """Header field of a picker with this secret."""
    name, value = hint_field(msgspec.json.encode(RETENTION_HINT), secret, own=own, prefill=prefill)
    return {name.decode(): value.decode()}


async def test_hints_of_the_picker_reach_the_engines_that_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.admission.gate._LOOK_EVERY_S", 0.0)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    hint = {"retention_hint": RETENTION_HINT}

    async with (
        running(P, D) as engines,
        fronting(engines[0]) as p,
        fronting(engines[1]) as d,
        sidecar(d, p, secret_file=str(secret)) as beside,
    ):
        for own, prefill in ((True, False), (False, True)):
            fields = signed(b"s" * 32, own=own, prefill=prefill)
            status, answer, told = await beside.ask(completion(own), endpoint(p), **fields)
            assert (status, told) == (200, "0 0"), answer
            for front, has in ((p, prefill), (d, own)):
                params = params_at(front)[-1]
                assert params.keys() > {"do_remote_decode", "do_remote_prefill"}
                assert params.get("retention_hint") == (RETENTION_HINT if has else None)
        body = completion(3)
        status, _, _ = await beside.ask(body, **signed(b"s" * 32))
        assert (status, params_at(d)[-1]) == (200, hint)
        assert not any(b"x-kvatlas" in name.encode() for _, seen in (*p.seen, *d.seen) for name in seen)
        # A client claims: in the body, without a signature, or with one of another secret.
        secret.write_bytes(b"t" * 32)
        for fields in ({}, {"x-kvatlas-retention-hint": "o {}"}, signed(b"s" * 32)):
            status, _, _ = await beside.ask({**body, "kv_transfer_params": hint}, **fields)
            assert (status, params_at(d)[-1]) == (200, None)
        assert beside.sidecar.pd_stats.hints_refused == 2
        status, _, _ = await beside.ask(body, **signed(b"t" * 32))
        assert (status, params_at(d)[-1]) == (200, hint)
        secret.write_bytes(b"short")
        status, _, _ = await beside.ask(body, **signed(b"t" * 32))
        assert (status, params_at(d)[-1]) == (200, hint)
        assert beside.sidecar.pd_stats.secret_failures == 1


class Silent:
    """A server that reads what comes and answers nothing."""

    def __init__(self) -> None:
        self.read = b""
        self.left = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.read += data
        self.left = True
        writer.close()


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[Silent, str]]:
    said = Silent()
    async with await asyncio.start_server(said.serve, "127.0.0.1", 0) as server:
        yield said, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_engine_that_may_not_be_asked_never_is() -> None:
    """A client that writes the field itself gets nobody to connect to its address."""

    expected = await alone(completion(1))
    async with silent() as (trap, address), running(P, D) as (p, d), sidecar(d, p) as beside:
        status, answer, told = await beside.ask(completion(1), address)
        assert (status, words(answer), told) == (200, expected, "- -")
        status, _, told = await beside.ask(completion(2), address, endpoint(p))
        assert (status, told) == (200, "1 0")
        stats = beside.sidecar.pd_stats
        assert (stats.prefillers_refused, stats.aggregated) == (1, {"not_allowed": 1})
        assert trap.read == b""


@pytest.mark.parametrize("point", ["before_answer", "after_answer"])
async def test_a_prefill_engine_that_dies_costs_no_answer(point: str) -> None:
    """Where no request is a suspect."""
    expected, proxy = await alone(completion(1)), ProxySettings(suspect_s=0.0)
    async with running({**P, "dies_at": point}, D) as (p, d), sidecar(d, p, proxy=proxy) as beside:
        status, answer, told = await beside.ask(completion(1), endpoint(p))
        assert (status, words(answer), told) == (200, expected, "- -")


async def test_a_prompt_that_ends_a_prefill_engine_ends_no_other_one() -> None:
    dies = {**P, "dies_at": "before_answer"}
    async with running(dies, dies, D) as (one, other, d), sidecar(d, one, other) as beside:
        for engine in (one, other):
            status, answer, _ = await beside.ask(completion(1), endpoint(engine))
            assert (status, answer["error"]["code"]) == (503, "engine_died")
        status, answer, _ = await beside.ask(completion(2), endpoint(d))
        assert status == 200, answer
        assert beside.sidecar.pd_stats.split == 1


async def test_a_prefill_that_takes_as_long_as_those_before_it_is_no_silence() -> None:
    now = 0.0
    stats = PdStats()
    placer = SidecarPlacer(
        "http://d:1", Allowed(("p:1",)), scheme="http", stats=stats, p2p_port=5710, clock=lambda: now
    )
    body = msgspec.json.encode(completion(1, stream=True))
    fields = [(b"x-prefiller-host-port", b"p:1")]

    async def asked() -> Attempt | None:
        request = InboundRequest("POST", "/v1/completions", b"", fields, body, stream=True)
        return (await placer.place(request, exclude=frozenset())).prefill

    first = await asked()
    assert first is not None
    now = 10.0
    first.first_byte(200)
    assert await asked() is not None
    now = 10.0 + 15.0 + 2 * 10.0 - 0.1
    assert await asked() is not None
    now += 0.2
    assert await asked() is not None  # the one probe
    assert await asked() is None
    assert stats.aggregated == {"no_prefill_engine": 1}


async def test_the_next_one_of_the_list_is_asked() -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with running(P, D) as (p, d), sidecar(d, p, dead) as beside:
        status, _, told = await beside.ask(completion(1), dead, endpoint(p))
        assert (status, told) == (200, "1 0")
        assert beside.sidecar.pd_stats.prefill_failures == {"refused": 1}


async def test_blocks_whose_lease_is_nearly_over_are_not_fetched() -> None:
    pd = PdSettings(lease_s=1e-6, lease_margin_s=0.0)
    async with running(P, D) as (p, d), sidecar(d, p, pd=pd) as beside:
        status, answer, told = await beside.ask(completion(1), endpoint(p))
        assert (status, told, WRONG_MARK in str(answer)) == (200, "- -", False)
        stats = beside.sidecar.pd_stats
        assert (stats.split, stats.leases_late, stats.handoffs) == (2, 2, 0)


async def test_engines_that_refuse_each_other_cost_no_answer() -> None:
    """The picker has taken care of versions; told of others all the same, the sidecar goes on."""

    async with running({**P, "version": "0.31.0"}, D) as (p, d), sidecar(d, p) as beside:
        status, _, told = await beside.ask(completion(1), endpoint(p))
        assert (status, told) == (200, "- -")
        assert beside.sidecar.pd_stats.handoffs_lost == 1


OWN_TOOL: dict[str, Any] = {
    "model": MODEL,
    "input": TEXT,
    "max_output_tokens": 6,
    "tools": [{"type": "code_interpreter"}],
}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/completions", completion(1, n=2, temperature=1.0), "n"),
        ("/v1/completions", completion(1, use_beam_search=True, n=2), "n"),
        ("/v1/completions", completion(1, prompt=[TEXT, TEXT[::-1]]), "prompts"),
        (
            "/v1/completions",
            completion(1, prompt=[completion(1)["prompt"], completion(2)["prompt"]]),
            "prompts",
        ),
        ("/v1/responses", OWN_TOOL, "tools"),
        ("/v1/responses", {**OWN_TOOL, "stream": True}, "tools"),
        (
            "/v1/responses",
            {"model": MODEL, "input": "a", "previous_response_id": "resp_1"},
            "previous_response_id",
        ),
    ],
)
async def test_what_cannot_be_split_is_not(path: str, body: dict[str, Any], why: str) -> None:
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        _, answer, told = await beside.ask(body, endpoint(p), path=path)
        assert (told, beside.sidecar.pd_stats.aggregated) == ("- -", {why: 1})
        assert WRONG_MARK not in str(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_every_connector(connector: str, stream: bool) -> None:
    expected = [await alone(completion(number)) for number in (1, 2)]
    async with connected(connector) as (p, d, pd), sidecar(d, p, pd=pd) as beside:
        for number in (1, 2):
            asked = completion(number, stream=stream)
            status, answer, told = await beside.ask(asked, endpoint(p))
            assert (status, (told or "")[:2]) == (200, "0 ")
            assert WRONG_MARK not in str(answer)
            assert stream or words(answer) == expected[number - 1]
        assert beside.sidecar.pd_stats.handoffs == 2


async def test_a_clients_parameters_reach_no_engine() -> None:
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        killing = completion(1, kv_transfer_params={"do_remote_prefill": True})
        for named in ((), (endpoint(p),)):
            status, _, _ = await beside.ask(killing, *named)
            assert status == 200


async def test_a_client_that_leaves_closes_the_open_request() -> None:
    """The prefill engine was not told the rank that was chosen: that is of the engine that answers."""

    async with silent() as (p, address), running(D) as (d,), sidecar(d, address) as beside:
        headers = {"x-data-parallel-rank": "3"}
        asked = asyncio.ensure_future(beside.ask(completion(1), address, **headers))
        await until(lambda: b'"max_tokens": 1' in p.read or b'"max_tokens":1' in p.read, "it is asked")
        assert b"x-request-id" in p.read
        assert b"x-data-parallel-rank" not in p.read
        assert b"x-prefiller-host-port" not in p.read
        asked.cancel()
        await until(lambda: p.left, "the connection is closed")
        await until(
            lambda: beside.sidecar.proxy.stats.clients_gone == 1, "and the client is known to be gone"
        )


async def test_health_readiness_and_metrics_are_on_a_port_of_their_own() -> None:
    async with running(P, D) as (p, d), sidecar(d, p) as beside:
        await beside.ask(completion(1), endpoint(p))
        assert (await beside.get("/health", ops=True))[0] == 200
        assert (await beside.get("/ready", ops=True))[0] == 200
        _, page = await beside.get("/metrics", ops=True)
        assert "kvatlas_pd_handoffs_total 1.0" in page
        assert "kvatlas_proxy_requests_total 1.0" in page
        await d.stop()
        status, text = await beside.get("/ready", ops=True)
        assert (status, d.base_url in text) == (503, True)
        status, _, _ = await beside.ask(completion(1))
        assert status in {502, 503}


async def test_a_source_of_engines_says_who_may_be_asked(tmp_path: Any) -> None:
    async with running(P, D) as (p, d):
        listed = tmp_path / "engines.toml"
        listed.write_text(f'[[engines]]\nbase_url = "{p.base_url}"\nrole = "prefill"\n')
        fleet = FleetSettings(file=FileSettings(path=str(listed)))
        async with sidecar(d, fleet=fleet) as beside:
            await until(lambda: bool(beside.sidecar.allowed.listed), "the file has been read")
            _, _, told = await beside.ask(completion(1), endpoint(p))
            assert told == "0 0"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sidecar": SidecarSettings()}, "sidecar.prefills"),
        ({"sidecar": SidecarSettings(prefills=("10.0.0.1",))}, "sidecar.prefills"),
        (
            {
                "sidecar": SidecarSettings(prefills=("p:1",)),
                "server": ServerConfig(tls_cert_file="/none", tls_key_file="/none"),
            },
            "server.tls_cert_file",
        ),
    ],
)
def test_what_cannot_work_is_said_at_the_start(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check(Config(**changes))


async def test_a_reload_changes_whom_it_may_ask() -> None:
    """And a configuration by which it could ask nobody changes nothing."""

    async with running(P, D) as (p, d), sidecar(d, "nobody:1") as beside:
        stats, before = beside.sidecar.pd_stats, beside.sidecar.config
        wanted = [before]
        reloads = reloads_of(beside.sidecar, lambda: wanted[-1])

        async def reloaded(*prefills: str, **changes: Any) -> dict[str, int]:
            own = msgspec.structs.replace(before.sidecar, prefills=prefills)
            wanted.append(msgspec.structs.replace(before, sidecar=own, **changes))
            await reloads.once()
            return {outcome: count for outcome, count in reloads.stats.reloads.items() if count}

        await beside.ask(completion(1), endpoint(p))
        assert (stats.split, stats.prefillers_refused) == (0, 1)
        assert await reloaded() == {"refused": 1}
        assert await reloaded("no port") == {"refused": 2}
        assert beside.sidecar.config is before
        assert await reloaded(endpoint(p), pd=PdSettings(lease_s=60)) == {"applied": 1, "refused": 2}
        assert (await beside.ask(completion(1), endpoint(p)))[2] == "0 0"
        assert (stats.split, beside.sidecar.config.pd.lease_s) == (1, 60)
        status, page = await beside.get("/health")
        assert status == 200, page  # still passed on
        _, page = await beside.get("/metrics", ops=True)
        assert 'kvatlas_config_reloads_total{outcome="applied"} 1.0' in page
        assert await reloaded(endpoint(p), server=ServerConfig(port=1)) == {"applied": 2, "refused": 2}
        assert reloads.stats.waiting == 1  # the port


TIER: dict[str, Any] = {"kv_connector": "offloading", "host_blocks": 4000}


@pytest.mark.parametrize("allowed", [True, False])
async def test_the_engine_pulls_from_a_source_that_is_allowed(allowed: bool) -> None:
    async with running(TIER, TIER) as (source, engine):
        assert source.connector is not None
        pd = PdSettings(offloading_port=source.connector.address[1])
        may = source if allowed else "10.9.9.9:1"
        async with sidecar(engine, may, pd=pd) as rig:
            async with rig.session.post(f"{source.base_url}/v1/completions", json=completion(1)) as first:
                known = await first.json()
            field = {"x-kv-cache-source-host-port": endpoint(source)}
            status, answer, _ = await rig.ask(completion(1), **field)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == known["choices"][0]["text"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (688 if allowed else 0)
            assert rig.sidecar.pd_stats.kv_sources_refused == (not allowed)
            status, _, _ = await rig.ask(completion(1, n=2), **field)
            assert status == 200


@pytest.mark.parametrize("named", ["", "10.0.0.1", "10.0.0.1:x", "a b:1"])
async def test_a_source_that_is_no_endpoint_is_ignored(named: str) -> None:
    async with running(TIER) as (engine,), sidecar(engine, "10.0.0.1:8000") as rig:
        status, _, _ = await rig.ask(completion(1), **{"x-kv-cache-source-host-port": named})
        assert status == 200
        assert rig.sidecar.pd_stats.kv_sources_refused == 0


@pytest.mark.parametrize(
    ("pattern", "endpoint", "expected"),
    [
        ("10.0.0.7:8000", "10.0.0.7:8000", True),
        ("10.0.0.7:8000", "10.0.0.7:8001", False),
        ("10.0.0.7:8000", "10.0.0.8:8000", False),
        ("10.4.0.0/16:8000", "10.4.255.1:8000", True),
        ("10.4.0.0/16:8000", "10.5.0.1:8000", False),
        ("10.4.0.0/16:8000", "10.4.0.1.evil.example:8000", False),
        ("[fd00::/8]:8000", "[fd12::1]:8000", True),
        ("[fd00::/8]:8000", "[fe80::1]:8000", False),
        ("[fd00::1]:8000", "[fd00:0::1]:8000", True),
        ("10.0.0.0/8:8000", "[::ffff:10.0.0.1]:8000", False),
        ("prefill.svc:8000", "Prefill.svc:8000", True),
        ("prefill.svc:8000", "prefill.svc.evil:8000", False),
    ],
)
def test_patterns(pattern: str, endpoint: str, expected: bool) -> None:
    assert (endpoint in Allowed([pattern])) is expected


def test_what_a_source_names_is_allowed_as_long_as_it_does() -> None:
    allowed = Allowed([])
    assert "10.0.0.1:8000" not in allowed
    allowed.listed = frozenset({"10.0.0.1:8000"})
    assert "10.0.0.1:8000" in allowed
    assert "10.0.0.1:22" not in allowed


@pytest.mark.parametrize("text", ["", "10.0.0.1", ":8000", "10.0.0.1:0", "10.0.0.1:70000", "10.4.1.0/16:80"])
def test_a_pattern_that_is_none_is_said_to_be_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT|has host bits set"):
        Allowed([text])


_NETWORK = Allowed(["10.4.0.0/16:8000"])


@settings(max_examples=examples(200))
@given(st.text(st.sampled_from("014.x:[]/@"), max_size=20), st.sampled_from([80, 8000]))
def test_no_name_slips_into_a_network(host: str, port: int) -> None:
    if f"{host}:{port}" in _NETWORK:
        assert port == 8000
        assert host.strip("[]").startswith("10.4.")


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
