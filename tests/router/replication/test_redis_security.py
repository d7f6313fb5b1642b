"""Access to the server: least rights, TLS, Sentinel, and passwords that show nowhere."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvatlas.router.config.load import load
from kvatlas.router.replication.index_url import SettingsError
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.settings import SharedSettings
from kvatlas.router.tools import index as index_commands
from tests.router.replication.backend import make_settings
from tests.router.replication.replicas import CPU, FULL, Replicas, blocks
from tests.support.paths import ROOT
from tests.support.pki import make_authority, make_certificate
from tests.support.ports import free_port
from tests.support.process_fleet import fleet
from tests.support.redis_servers import Cluster, Server, any_program
from tests.support.waiting import run, until

pytestmark = pytest.mark.real  # a Redis or Valkey server

# What the index itself needs; operators get the whole list, with what replicas need besides.
_SCRIPTS = ["+evalsha", "+eval", "+time"]
_STRINGS = ["+get", "+mget", "+set", "+del", "+pexpire"]
_HASHES = ["+hget", "+hset", "+hmget", "+hgetall", "+hdel", "+hkeys"]
_STREAMS = ["+xrevrange", "+xread"]
RIGHTS = ["+info", *_SCRIPTS, *_STRINGS, *_HASHES, *_STREAMS]
CLUSTER_RIGHTS = ["+cluster|slots"]


def allow(server: Server, name: str, namespace: str, *rights: str) -> None:
    reply = server.command("ACL", "SETUSER", name, "on", ">hunter2", f"~{namespace}:*", *rights)
    assert reply == b"OK", reply


async def everything(replicas: Replicas) -> None:
    """Every command there is: leases, claims, descriptions, writes, removals, look-ups, retirement."""
    writer = replicas["a"]
    await writer.take("e", "f")
    writer.mirror.store("e", FULL, blocks(1, 2, 3))
    writer.mirror.store("e", CPU, blocks(2))
    writer.mirror.store("f", FULL, blocks(2))
    await writer.mirror.flush()
    writer.mirror.remove("e", FULL, blocks(1, 2))
    writer.mirror.forget("f")
    await writer.mirror.flush()
    assert await replicas.exact(blocks(1, 2, 3, 4))
    await writer.leases.renew(writer.mirror.mirrored())
    assert set(await writer.leases.holders()) == {"e", "f"}
    token = writer.mirror.mirrored()["f"]
    await writer.mirror.retire("f")
    assert await writer.leases.release("f", token)
    registry = writer.mirror.registry
    await registry.check()
    await registry.replace_servers(await registry.open())
    await registry.invalidate("e", writer.mirror.mirrored()["e"])


async def test_the_documented_rights_are_enough(servers: Server | Cluster) -> None:
    clustered = isinstance(servers, Cluster)
    nodes = servers.nodes if isinstance(servers, Cluster) else [servers]
    namespace = "rights"
    for node in nodes:
        allow(node, "router", namespace, "-@all", *RIGHTS, *(CLUSTER_RIGHTS if clustered else []))
    url = servers.url.replace("://", "://router:hunter2@")

    async with Replicas(make_settings(url, namespace=namespace), "a") as replicas:
        await everything(replicas)


@pytest.mark.parametrize("right", RIGHTS)
def test_none_of_them_is_idle(plain_server: Server, right: str) -> None:
    """Without any one of them something fails, and by the server's own log it is this one that is missed.

    The answer to a client differs between servers and versions; the log of refusals does not.
    """
    namespace = "idle"
    rights = [other for other in RIGHTS if other != right]
    plain_server.command("ACL", "DELUSER", "poor")
    plain_server.command("ACL", "LOG", "RESET")
    allow(plain_server, "poor", namespace, "-@all", *rights)
    url = plain_server.url.replace("://", "://poor:hunter2@")

    async def body() -> None:
        settings = make_settings(url, namespace=namespace)
        if why := await problem(settings):
            raise IndexUnavailable("connection", why)
        async with Replicas(settings, "a") as replicas:
            await everything(replicas)

    with pytest.raises(IndexUnavailable):
        asyncio.run(body())
    assert right.removeprefix("+") in refusals(plain_server, "poor")


async def problem(settings: SharedSettings) -> str:
    """Why it does not connect; "": it does."""
    client = Client(settings)
    await client.start()
    await until(lambda: client.last_error or client.masters(), "an answer", ignoring=(IndexUnavailable,))
    await client.close()
    with pytest.raises(IndexUnavailable):
        _ = client.identity
    return client.last_error


def refusals(server: Server, user: str) -> set[str]:
    """The commands that the server refused a user for want of rights, by its own log."""
    entries = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in server.command("ACL", "LOG")]
    return {
        entry[b"object"].decode()
        for entry in entries
        if entry[b"reason"] == b"command" and entry[b"username"] == user.encode()
    }


@pytest.mark.parametrize("userinfo", ["router:wrong@", "nobody:hunter2@", ""])
async def test_without_rights_nothing_connects_and_nothing_leaks(
    userinfo: str, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    server.command("ACL", "SETUSER", "default", "off")
    why = await problem(make_settings(server.url.replace("://", f"://{userinfo}")))
    assert "AUTH" in why or "WRONGPASS" in why
    told = why + capsys.readouterr().out
    assert "wrong" not in told.replace("WRONGPASS", "")
    assert "hunter2" not in told


def tls_server(folder: Path, *options: str) -> tuple[Server, str]:
    """A server with the certificate ``server`` of the folder's authority ``ca``, and its URL."""
    make_authority(folder)
    make_certificate(folder, "server")
    port = free_port()
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    own = [word for name, file in files.items() for word in (f"--tls-{name}-file", str(folder / file))]
    try:
        return Server(any_program(), "--tls-port", str(port), *own, *options), f"rediss://127.0.0.1:{port}/0"
    except AssertionError:
        pytest.skip("this server is built without TLS")


async def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    server, url = tls_server(tmp_path)
    own = f"cert={tmp_path}/server.crt&key={tmp_path}/server.key"

    with server:
        async with Replicas(make_settings(f"{url}?ca={tmp_path}/ca.crt&{own}"), "a") as replicas:
            await everything(replicas)
        why = await problem(make_settings(f"{url}?{own}"))
        assert "certificate" in why.lower(), "it is not trusted"
        with pytest.raises(SettingsError, match="TLS files"):
            Client(make_settings(f"{url}?ca=/nowhere.pem"))


async def test_an_authority_given_in_the_url_replaces_those_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = tls_server(tmp_path, "--tls-auth-clients", "no")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))  # what the system trusts
    make_authority(tmp_path, "other")

    as_sentinel = url.replace("rediss://", "rediss+sentinel://").replace("/0", "/main")

    with server:
        assert await problem(make_settings(url)) == ""
        why = await problem(make_settings(as_sentinel))
        assert "SENTINEL" in why, "it is none, but its certificate is accepted"
        other = f"?ca={tmp_path}/other.crt"
        assert "CERTIFICATE_VERIFY_FAILED" in await problem(make_settings(url + other))
        assert "does not answer" in await problem(make_settings(as_sentinel + other))


@pytest.mark.process
async def test_sentinel(tmp_path: Path) -> None:
    binary = any_program()
    master = Server(binary)
    config, port = tmp_path / "sentinel.conf", free_port()
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
    )
    sentinel = subprocess.Popen([binary, str(config), "--sentinel"])

    try:
        settings = make_settings(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main/2")
        async with Replicas(settings, "a") as replicas:
            await everything(replicas)
        stranger = make_settings(f"redis+sentinel://127.0.0.1:{port}/other")
        assert "no master named 'other'" in await problem(stranger)
    finally:
        sentinel.kill()
        sentinel.wait()
        master.close()


async def test_a_replica_is_not_written_to() -> None:
    binary = any_program()
    master = Server(binary)
    with Server(binary, "--replicaof", f"127.0.0.1 {master.port}") as replica:
        assert "replica" in await problem(make_settings(replica.url))
        master.close()


DOCS = ROOT / "docs" / "redis.md"
SECRET = "correct-horse"
USER, TOOL = f"kvatlas:{SECRET}", f"tool:{SECRET}"


def documented_acl() -> list[str]:
    """The ``ACL SETUSER`` command of the documentation, as words."""
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(r"^(ACL SETUSER kvatlas (?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE)
    assert found is not None
    return found[1].replace("\\\n", " ").replace(">PASSWORD", f">{SECRET}").split()


@pytest.mark.process
def test_a_fleet_works_with_the_documented_rights_only() -> None:
    async def main(server: Server) -> None:
        url, tools = (server.url.replace("redis://", f"redis://{who}@") for who in (USER, TOOL))
        async with fleet(url, tools=tools, engines=2) as made:
            await made.clients.more(20)
            await made.check_exact()
            for member in made.members:
                assert await made.metric(member, "kvatlas_mirror_errors_total") == 0
                assert (
                    await made.metric(member, "kvatlas_shared_index_fallbacks_total") <= 2
                )  # before it connected
            logged = msgspec.json.encode([member.lines for member in made.members]).decode()
            assert SECRET not in logged
            assert "NOPERM" not in logged

    with Server(any_program()) as server:
        server.command(*documented_acl())
        server.command("ACL", "SETUSER", "tool", "on", f">{SECRET}", "~*", "&*", "+@all")
        server.command("ACL", "SETUSER", "default", "resetpass", ">other")
        run(main(server))


def test_a_password_among_the_flags_is_refused_with_the_remedy(
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    url = f"redis://kvatlas:{SECRET}@127.0.0.1:1/0"
    engine = ("--engine", "http://127.0.0.1:1")
    for flags in (("--index", url), ("--set", f"index.url={url}")):
        refused = kvatlas("serve", *engine, *flags)
        assert refused.returncode == 2
        assert "--index-file" in refused.stderr
        assert "KVATLAS_INDEX_URL" in refused.stderr
        assert SECRET not in refused.stderr + refused.stdout


def test_a_password_from_environment_or_file_is_taken_and_never_printed(
    tmp_path: Path,
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_commands, "_CONNECT_S", 0.5)  # a server that refuses is asked again until then
    url = f"redis://kvatlas:{SECRET}@127.0.0.1:1/0"
    path = tmp_path / "url"
    path.write_text(url + "\n")
    assert load(index_file=path, environ={}).config.index.url == url
    from_file = kvatlas("serve", "--print-config", "--index-file", str(path))
    from_environment = kvatlas("serve", "--print-config", KVATLAS_INDEX_URL=url)
    for printed in (from_file, from_environment, kvatlas("index", "stats", KVATLAS_INDEX_URL=url)):
        assert SECRET not in printed.stderr + printed.stdout
    for shown in (from_file, from_environment):
        assert 'index.url = "redis://kvatlas:***@127.0.0.1:1/0"' in shown.stdout
