from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.connectors.store.file import FileSettings, FileStore
from kvatlas.connectors.store.mooncake import MooncakeSettings, MooncakeStore
from kvatlas.connectors.store.redis import RedisSettings, RedisStore
from kvatlas.connectors.store.redis_link import RedisAddress
from tests.connectors.store.mooncake_double import Cluster, DoubleClient
from tests.connectors.store.mooncake_kit import Service
from tests.connectors.store.store_kit import MemoryStore, Shared
from tests.support.redis_servers import Server, binaries, program

KINDS = ["memory", "file", "redis", "valkey", "mooncake double", "mooncake"]


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[dict[str, Server]]:
    """Started when first asked for; by kind."""
    started: dict[str, Server] = {}
    yield started
    for server in started.values():
        server.close()


def server_of(kind: str, started: dict[str, Server]) -> Server:
    binary = program(kind)
    if kind not in started:
        started[kind] = Server(binary)
    return started[kind]


@pytest.fixture
def any_server(redis_servers: dict[str, Server]) -> Server:
    found = binaries()
    return server_of("valkey" if "valkey" in found else "redis", redis_servers)


@pytest.fixture(params=KINDS)
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, redis_servers: dict[str, Server]
) -> Iterator[Shared]:
    """The same store several times over, as the engines of a fleet have it."""
    kind = request.param
    if kind == "memory":
        memory = MemoryStore()
        made = Shared(lambda: memory, lambda key, value: memory.values.update({key: value}))
    elif kind == "file":
        made = _file(tmp_path)
    elif kind == "mooncake double":
        made = _mooncake_double()
    elif kind == "mooncake":
        made = request.getfixturevalue("mooncake_shared")
    else:
        made = _redis(server_of(kind, redis_servers))
    yield made
    made.close()


def _file(folder: Path) -> Shared:
    settings = FileSettings(folder / "blocks", max_bytes=1 << 30)
    store = FileStore(settings, sweeps=False)

    def overwrite(key: bytes, value: bytes) -> None:
        Path(store._path(key)).write_bytes(value)

    return Shared(lambda: FileStore(settings, sweeps=False), overwrite)


def _redis(server: Server) -> Shared:
    server.command("FLUSHALL")
    settings = RedisSettings(RedisAddress(port=server.port))

    def overwrite(key: bytes, value: bytes) -> None:
        server.command("SET", settings.prefix.encode() + key, value)

    return Shared(lambda: RedisStore(settings), overwrite)


def _mooncake_double() -> Shared:
    cluster = Cluster()
    settings = MooncakeSettings(master="double:1", metadata="double:2", hostname="here")

    def overwrite(key: bytes, value: bytes) -> None:
        cluster.values[key.hex()] = value

    return Shared(lambda: MooncakeStore(settings, client=DoubleClient(cluster)), overwrite)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that accepts connections and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in accepted:
        connection.close()


@pytest.fixture(scope="session")
def mooncake_service() -> Iterator[Service]:
    """A master of Mooncake, where its wheel is installed and loads."""
    try:
        import mooncake.store  # noqa: PLC0415
    except ImportError as error:
        pytest.skip(f"needs Mooncake, which scripts/vllm_env.sh installs: {error}")
    service = Service(Path(mooncake.store.__file__).with_name("mooncake_master"))
    yield service
    service.close()


@pytest.fixture
def mooncake_shared(mooncake_service: Service) -> Shared:
    return mooncake_service.shared()
