"""Reachability: published paths, network policies, what the processes of a node can read."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.charts.chart import MINIMAL, Document, Rendered, load
from tests.charts.test_rendered import EVERYTHING
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.redis_servers import program

PASSWORD = 'se"cr\\et #1 $HOME'


def admits(policy: Document, labels: dict[str, str], port: str) -> bool:
    """Whether a pod of the release's namespace with these labels gets through to a named port."""
    for rule in policy["spec"]["ingress"]:
        if port not in {entry["port"] for entry in rule["ports"]}:
            continue
        if not rule.get("from"):
            return True
        for peer in rule["from"]:
            if "namespaceSelector" not in peer and "podSelector" in peer:
                wanted = peer["podSelector"].get("matchLabels", {})
                if wanted.items() <= labels.items():
                    return True
    return False


def test_only_the_clients_api_is_published() -> None:
    rendered = Rendered(EVERYTHING)
    rules = rendered.one("Ingress")["spec"]["rules"]
    assert [(p["path"], p["pathType"]) for rule in rules for p in rule["http"]["paths"]] == [
        ("/v1", "Prefix")
    ]
    routes = rendered.one("HTTPRoute")["spec"]["rules"]
    matches = [match["path"] for rule in routes for match in rule["matches"]]
    assert matches == [{"type": "PathPrefix", "value": "/v1"}]


@pytest.mark.parametrize("values", [EVERYTHING, load(ROOT / "examples" / "production.yaml")])
def test_the_releases_own_test_gets_through(values: dict[str, Any]) -> None:
    rendered = Rendered(values)
    policy = rendered.one("NetworkPolicy", suffix="kvatlas")
    assert admits(policy, rendered.one("Pod", suffix="-test")["metadata"]["labels"], "http")


def test_where_clients_are_named_others_are_kept_out() -> None:
    policy = Rendered(load(ROOT / "examples" / "production.yaml")).one("NetworkPolicy")
    assert not admits(policy, {"app": "stranger"}, "http")
    assert not admits(policy, {"app": "stranger"}, "ops")


def test_clients_do_not_reach_the_ops_port() -> None:
    """The lists of clients and of readers of metrics differ."""
    rendered = Rendered(load(ROOT / "examples" / "production.yaml"))
    rules = rendered.one("NetworkPolicy")["spec"]["ingress"]
    ports = [[port["port"] for port in rule["ports"]] for rule in rules]
    assert ports == [["http"], ["ops"]]


def command(container: Document) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def test_valkeys_password_is_in_no_argument_and_is_the_password(tmp_path: Path) -> None:
    """The container's own command with a real server, which hears on a free port of this machine."""
    valkey = Rendered({**MINIMAL, "valkey": {"enabled": True}}).one("StatefulSet")
    container = valkey["spec"]["template"]["spec"]["containers"][0]
    port = free_port()
    wrapper = tmp_path / "valkey-server"
    wrapper.write_text(f'#!/bin/sh\nexec {program("valkey")} "$@" --port {port} --bind 127.0.0.1\n')
    wrapper.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VALKEY_PASSWORD": PASSWORD}
    process = subprocess.Popen(command(container), env=environ, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        assert ask(port, ("PING",)) == ["NOAUTH Authentication required."]
        assert ask(port, ("AUTH", PASSWORD), ("CONFIG", "GET", "maxmemory")) == [
            "OK",
            ["maxmemory", str(512 << 20)],
        ]
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert b"valkey-server" in arguments[0], "the server itself is the container's first process"
        assert not any(PASSWORD[:4].encode() in argument for argument in arguments)
    finally:
        process.kill()
        process.wait()


def ask(port: int, *commands: tuple[str, ...]) -> list[Any]:
    """The replies, once the server is there; errors as text."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.01)
    parser = hiredis.Reader(encoding="utf-8", notEnoughData=Ellipsis)
    replies = []
    with connection:
        for words in commands:
            connection.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]
            while (reply := parser.gets()) is Ellipsis:
                parser.feed(connection.recv(4096))
            replies.append(str(reply) if isinstance(reply, hiredis.ReplyError) else reply)
    return replies
