"""Every name of a response proves its tenant, in any state of the store and the other routers.

Each case is a world on virtual time: two engines, a router and its store. A response of ``ada`` is made, then
something happens to the store or to the router, and everybody asks for it in every way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.key_file import KeyFile, digest_of
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.response_ids import ResponseIds, digits_of, engine_digits, of_engine, with_id
from kvatlas.router.replication.settings import IndexSettings
from tests.support.whole_router import MODEL, Rig, configure, routing, running, tenants
from tests.world.loop import VirtualLoop
from tests.world.redis_server import RedisServer
from tests.world.seams import run_with

# Connections to a store that was stopped under them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
STORE, HERE = "10.2.0.1", "127.0.0.1"
TEXT = "the secret of ada"
NEW = {"model": MODEL, "input": "x", "max_output_tokens": 2}


class World:
    """Two engines, the store, and the router that answers now."""

    def __init__(self, loop: VirtualLoop, folder: Path, stack: AsyncExitStack) -> None:
        self.loop = loop
        self.store = RedisServer((STORE, 6379))
        self.rules = {"ada": "", "eve": ""}
        self.settings: dict[str, Any] = {}
        self.renewed = ""
        """Tenant that has another key than before."""
        self._folder = folder
        self._stack = stack
        self._routers = AsyncExitStack()
        self.rig: Rig

    async def begin(self) -> str:
        """Returns the id of a response of ``ada``."""
        await self.store.start()
        self.engines = await self._stack.enter_async_context(running({}, {}))
        await self.start_router()
        made = await self.rig.ask("POST", "/v1/responses", NEW | {"input": TEXT}, key("ada"))
        assert made[0] == 200
        return str(made[1]["id"])

    async def start_router(self, *, shares: bool = True) -> None:
        """Another router in the place of the one that was: nothing of its memory is left."""
        await self._routers.aclose()
        keys = tenants(self._folder, self.rules, **self.settings)
        if self.renewed:
            file, old = Path(keys.file or ""), digest_of(f"key-of-{self.renewed}")
            file.write_text(file.read_text().replace(old, digest_of(f"key-of-{self.renewed}, renewed")))
        index = IndexSettings(url=self.store.url, replica=f"r{self.loop.time()}") if shares else None
        config = configure(*self.engines, keys=keys, index=index or IndexSettings())
        self.rig = await self._routers.enter_async_context(routing(config, wait=False))
        await self.until_served()

    async def until_served(self) -> None:
        while not all(engine.up for engine in self.rig.router.fleet):
            await asyncio.sleep(0.05)

    def store_takes(self, seconds: float) -> None:
        for a, b in ((HERE, STORE), (STORE, HERE)):
            self.loop.net.link(a, b).latency_s = (seconds / 2, seconds / 2)

    async def end(self) -> None:
        self.loop.net.cut(HERE, STORE, up=True)
        await self._routers.aclose()


async def nothing(world: World) -> None:
    pass


def takes(seconds: float) -> Callable[[World], Awaitable[None]]:
    async def happen(world: World) -> None:
        world.store_takes(seconds)

    return happen


async def hangs(world: World) -> None:
    world.loop.net.cut(HERE, STORE)


async def dies(world: World) -> None:
    world.store.stop()


async def is_emptied(world: World) -> None:
    world.store.stop()
    await world.store.start(empty=True)


async def router_restarts(world: World) -> None:
    await world.start_router()


async def router_and_store_restart(world: World) -> None:
    await is_emptied(world)
    await world.start_router()


async def all_workers_die_without_a_store(world: World) -> None:
    world.store.stop()
    await world.start_router(shares=False)


async def restarts_while_the_store_hangs(world: World) -> None:
    world.loop.net.cut(HERE, STORE)
    await world.start_router()


HAPPENS: dict[str, Callable[[World], Awaitable[None]]] = {
    "nothing": nothing,
    **{f"store takes {ms} ms": takes(ms / 1000) for ms in (3, 10, 50, 1000)},
    "store hangs": hangs,
    "store dies": dies,
    "store is emptied": is_emptied,
    "router restarts": router_restarts,
    "router and store restart": router_and_store_restart,
    "all workers die": all_workers_die_without_a_store,
    "restart beside a hung store": restarts_while_the_store_hangs,
}
# How a response is named: method, path, body, and the status for its owner (of the engine) and for others.
WAYS: dict[str, tuple[str, str, dict[str, Any] | None, set[int], int]] = {
    "get": ("GET", "/v1/responses/ID", None, {200}, 404),
    "stream": ("GET", "/v1/responses/ID?stream=true", None, {200, 400}, 404),
    "items": ("GET", "/v1/responses/ID/input_items", None, {404}, 404),
    "delete": ("DELETE", "/v1/responses/ID", None, {404, 405}, 404),
    "cancel": ("POST", "/v1/responses/ID/cancel", None, {400}, 404),
    "go on": ("POST", "/v1/responses", NEW | {"previous_response_id": "ID"}, {200}, 404),
    "render": ("POST", "/v1/responses/render", NEW | {"previous_response_id": "ID"}, {200}, 404),
    "take its place": ("POST", "/v1/responses", NEW | {"request_id": "ID", "store": False}, {200}, 400),
}


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}"} if tenant else {}


async def ask(world: World, way: str, response_id: str, tenant: str) -> tuple[int, Any]:
    method, path, body, _, _ = WAYS[way]
    named = msgspec.json.decode(msgspec.json.encode(body).replace(b'"ID"', f'"{response_id}"'.encode()))
    return await world.rig.ask(method, path.replace("ID", response_id), named, key(tenant))


async def check(world: World, response_id: str) -> None:
    """Everybody asks for the response of ``ada`` in every way, others before and after her."""
    for tenant in ("eve", "", "ada", "eve"):
        for way, (*_, own, foreign) in WAYS.items():
            status, answer = await ask(world, way, response_id, tenant)
            where = way, tenant, answer
            if tenant == "ada":
                assert status in own, where
                code = (answer.get("error") or {}).get("code") if isinstance(answer, dict) else None
                assert code != "response_not_found", where
            else:
                assert status == (foreign if tenant else 401), where
                assert TEXT not in str(answer), where
    status, kept = await ask(world, "get", response_id, "ada")
    assert (status, kept["id"]) == (200, response_id), "and it is the one that was made"


def in_world(folder: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with AsyncExitStack() as stack:
            world = World(loop, folder, stack)
            try:
                await story(world)
            finally:
                await world.end()

    run_with(main)


@pytest.mark.parametrize("happens", HAPPENS)
def test_the_owner_alone_reaches_a_response_whatever_happens(happens: str, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        response_id = await world.begin()
        await HAPPENS[happens](world)
        await check(world, response_id)

    in_world(tmp_path, story)


@pytest.mark.parametrize("state", ["held", "asleep"])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_response_is_read_where_its_engine_computes_nothing(
    engines: int, state: str, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        response_id = await world.begin()
        holder = engine_digits(response_id)
        for way in ("get", "cancel", "delete", "go on"):
            for engine in world.rig.router.fleet:
                if engines == 2 or digits_of(engine.engine_id) == holder:
                    setattr(engine, state, "drained" if state == "held" else True)
            status, answer = await ask(world, way, response_id, "ada")
            assert status in (WAYS[way][3] if way != "go on" else {503}), (way, answer)

    in_world(tmp_path, story)


@pytest.mark.parametrize("secret", ["", "secret_file", "isolate_secret_file"])
def test_a_configured_secret_outlives_new_keys_and_a_restart(secret: str, tmp_path: Path) -> None:
    """Without one the ids end with the key that they were made under: refused, never another's."""

    async def story(world: World) -> None:
        if secret:
            (tmp_path / "secret").write_text("s" * 32)
            world.settings = {secret: str(tmp_path / "secret")}
            if secret == "isolate_secret_file":
                world.settings["isolate"] = "tenant"
        response_id = await world.begin()
        world.rules = {"new": "", **world.rules}
        await world.start_router()
        assert (await ask(world, "get", response_id, "ada"))[0] == 200, "keys of others change nothing"
        for tenant in ("eve", "new"):
            assert (await ask(world, "get", response_id, tenant))[0] == 404
        world.renewed = "ada"
        await world.start_router()
        status, _ = await world.rig.ask("GET", f"/v1/responses/{response_id}", None, key("ada, renewed"))
        assert status == (200 if secret else 404)
        assert (await ask(world, "get", response_id, "eve"))[0] == 404

    in_world(tmp_path, story)


def test_the_engine_that_has_it_is_waited_for(tmp_path: Path) -> None:
    """Gone, down, or not known yet: 503 for the owner, 404 for others."""

    async def story(world: World) -> None:
        response_id = await world.begin()
        digits = engine_digits(response_id)
        (mine,) = [engine for engine in world.engines if digits_of(engine.base_url) == digits]
        world.engines = [engine for engine in world.engines if engine is not mine]
        await world.start_router()
        for way in ("get", "cancel", "go on"):
            status, answer = await ask(world, way, response_id, "ada")
            assert (status, answer["error"]["code"]) == (503, "no_ready_engine"), way
            assert (await ask(world, way, response_id, "eve"))[0] == 404
        world.engines.append(mine)
        await world.start_router()
        assert (await ask(world, "get", response_id, "ada"))[0] == 200
        await mine.stop()
        while any(engine.up for engine in world.rig.router.fleet if engine.engine_id == mine.base_url):
            await asyncio.sleep(0.05)
        status, answer = await ask(world, "get", response_id, "ada")
        assert (status, answer["error"]["code"]) == (503, "no_ready_engine")

    in_world(tmp_path, story)


def test_no_id_that_a_router_did_not_make_is_passed_on(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        response_id = await world.begin()
        last = "0" if response_id[-1] != "0" else "1"
        forged = [
            "resp_1",
            response_id[:-1],
            response_id + "0",
            response_id.upper(),
            response_id[:30] + ("0" if response_id[30] != "0" else "1") + response_id[31:],
            "resp_" + "0" * 64,
            "x" * 10_000,
            "resp_%00",
        ]
        for name in forged:
            for tenant in ("ada", "eve"):
                assert (await ask(world, "get", name, tenant))[0] == 404
                assert (await ask(world, "go on", name, tenant))[0] == 404
        # Another engine's digits are no right: that engine has no such response.
        assert (await ask(world, "get", response_id[:-1] + last, "eve"))[0] == 404
        assert (await ask(world, "get", response_id[:-1] + last, "ada"))[0] == 503
        # Names that no response can have are replaced.
        status, made = await world.rig.ask("POST", "/v1/responses", NEW | {"request_id": "mine"}, key("eve"))
        assert status == 200
        assert made["id"] != "mine"
        assert (await ask(world, "get", made["id"], "eve"))[0] == 200

    in_world(tmp_path, story)


def test_ids_prove_one_tenant_and_each_is_new(tmp_path: Path) -> None:
    file = KeyFile(Path(tenants(tmp_path, {"ada": "", "eve": ""}).file or ""), clock=lambda: 0.0)
    gate = KeyGate(file, clock=lambda: 0.0)
    ids, other = ResponseIds(gate.secrets), ResponseIds(lambda tenant, key_id: (b"x" * 32,))
    made = {of_engine(ids.make("ada"), "http://a:1") for _ in range(100)}
    assert len(made) == 100
    assert len({one[5:9] for one in made}) > 90, "random from its first digit on"
    for one in made:
        assert ids.is_of(one, "ada")
        assert not ids.is_of(one, "eve")
        assert not other.is_of(one, "ada")
        assert engine_digits(one) == digits_of("http://a:1") != digits_of("http://a:2")
    assert not ids.is_of(ids.make("ada"), "ada"), "no engine"


@pytest.mark.parametrize("first", ["old", "new"])
def test_while_keys_are_rotated_each_replica_takes_the_ids_of_the_others(first: str, tmp_path: Path) -> None:
    """An id is made under the key that its client uses, which each replica has that lets this client in."""

    def replica(name: str, *keys: str) -> tuple[ResponseIds, KeyGate]:
        path = tmp_path / f"{name}.toml"
        entries = [f'[[keys]]\ntenant = "ada"\nsha256 = "{digest_of(one)}"\n' for one in keys]
        path.write_text("[tenants.ada]\n" + "".join(entries))
        gate = KeyGate(KeyFile(path, clock=lambda: 0.0), clock=lambda: 0.0)
        return ResponseIds(gate.secrets), gate

    both = [first, "new" if first == "old" else "old"]
    replicas = replica("behind", "old"), replica("between", *both), replica("ahead", "new")
    for used in ("old", "new"):
        field = [(b"authorization", b"Bearer " + used.encode())]
        letting_in = []
        for ids, gate in replicas:
            with contextlib.suppress(ApiError):
                tenant, key_id = gate.owner_of(field)
                letting_in.append((ids, of_engine(ids.make(tenant.name, key_id), "http://a:1")))
        assert len(letting_in) == 2
        for ids, _ in letting_in:
            assert all(ids.is_of(made, "ada") for _, made in letting_in)


def test_a_tenant_without_a_secret_owns_nothing_that_anybody_could_make() -> None:
    public, without = ResponseIds(), ResponseIds(lambda tenant, key_id: ())
    one = of_engine(public.make("ada"), "http://a:1")
    assert public.is_of(one, "ada")
    assert not without.is_of(one, "ada")
    assert not without.is_of(of_engine(without.make("ada"), "http://a:1"), "ada")


@pytest.mark.parametrize("before", ["{", " {\n", "\ufeff{"])
def test_the_id_is_a_member_before_the_others(before: str) -> None:
    begin, rest = with_id((before + '"input":"x"}').encode(), "resp_1")
    assert msgspec.json.decode((begin + bytes(rest)).removeprefix(b"\xef\xbb\xbf")) == {
        "request_id": "resp_1",
        "input": "x",
    }
    for body in (b"{}", b"", b"[1]", b"x"):
        assert with_id(body, "resp_1") == (b"", body)
