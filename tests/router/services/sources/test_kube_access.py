"""How the API server is reached: in a cluster, by kubeconfig, as configured; and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.services.kubernetes.access import AccessError, find_access, read_kubeconfig
from kvatlas.router.services.kubernetes.transport import BadAnswerError, LineSplitter, make_client
from tests.router.services.sources.test_kube_source import certificates, seeing
from tests.support.kube_api import PODS, kube_api
from tests.support.kube_objects import pod

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def test_inside_a_cluster(tmp_path: Path) -> None:
    for name, text in (("token", "t0ken\n"), ("namespace", "serving\n")):
        (tmp_path / name).write_text(text)
    settings = KubernetesSettings(selector="a=b", credentials_dir=str(tmp_path))
    config = find_access(settings, IN_CLUSTER)
    assert config.cluster.server == "https://10.96.0.1:6443"
    assert config.namespace == "serving"
    six = find_access(settings, {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert six.cluster.server == "https://[fd00::1]:443"


def test_outside_a_cluster_it_says_what_to_give() -> None:
    with pytest.raises(AccessError, match=r"give fleet\.kubernetes\.kubeconfig or fleet\.kubernetes\.api"):
        find_access(KubernetesSettings(selector="a=b"), {})


def test_a_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    for url, fine in (("http://10.0.0.1:8001", False), ("http://127.0.0.1:8001", True)):
        settings = KubernetesSettings(selector="a=b", api=url, credentials_dir=str(tmp_path))
        if fine:
            find_access(settings, {})
        else:
            with pytest.raises(AccessError, match="not sent without TLS"):
                find_access(settings, {})


@pytest.mark.parametrize("content", [b"two\nlines", b"\xff\xfe"])
def test_an_unusable_token_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    settings = KubernetesSettings(selector="a=b", credentials_dir=str(tmp_path))
    with pytest.raises(AccessError, match=str(path)):
        find_access(settings, IN_CLUSTER)


async def test_a_token_that_becomes_invalid_is_not_logged(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    async with kube_api() as kube, seeing(kube, tmp_path) as seen:
        await seen.sees({})
        kube.tokens = {"new"}
        (tmp_path / "token").write_text("secret\nlines")
        await kube.cut()
        await seen.until(lambda: "unauthorized" in seen.source.stats.errors, "refused")
        await seen.until(lambda: "one line of text" in seen.source.stats.last_error, "said why")
        assert "secret" not in seen.source.stats.last_error
        (tmp_path / "token").write_text("new")
        await seen.until(lambda: kube.seen_tokens[-1] == "new", "logged in again")


def test_an_unusable_ca_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    path.write_text("no certificate")
    settings = KubernetesSettings(selector="a=b", credentials_dir=str(tmp_path))
    with pytest.raises(AccessError, match=str(path)):
        make_client(find_access(settings, IN_CLUSTER))


def kubeconfig(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "other", "context": {"cluster": "none", "user": "none"}},
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "serving"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://k:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(tree))
    return path


async def tokens_sent(tmp_path: Path, user: dict[str, Any]) -> list[str]:
    async with kube_api() as kube:
        path = kubeconfig(tmp_path / "config", user, server=kube.url)
        async with seeing(kube, tmp_path, api=None, kubeconfig=str(path), namespaces=()) as seen:
            await seen.sees({})
            return kube.seen_tokens


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    config = read_kubeconfig(kubeconfig(tmp_path / "config", {"token": "t"}))
    assert (config.cluster.server, config.namespace) == ("https://k:6443/", "serving")
    (tmp_path / "tok").write_text("beside")
    for user, token in (({"token": "t"}, "t"), ({"tokenFile": "tok"}, "beside")):
        assert set(asyncio.run(tokens_sent(tmp_path, user))) == {token}


def test_a_kubeconfig_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(
        "current-context: here\ncontexts:\n- name: here\n  context: {cluster: c, user: u}\n"
        "clusters:\n- name: c\n  cluster: {server: 'https://k'}\nusers:\n- name: u\n  user: {token: t}\n"
    )
    config = read_kubeconfig(path)
    assert config.user is not None
    assert config.user.token == "t"


def plug_in(tmp_path: Path, script: str, version: str = "v1") -> dict[str, Any]:
    path = tmp_path / "login.py"
    path.write_text(script)
    login = {"apiVersion": f"client.authentication.k8s.io/{version}", "command": sys.executable}
    return {"exec": {**login, "args": [str(path)], "env": [{"name": "WHO", "value": "router"}]}}


@pytest.mark.real  # a process
@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_a_login_plug_in_is_run_again_when_its_token_is_refused(tmp_path: Path, version: str) -> None:
    token = tmp_path / "answer.json"
    user = plug_in(
        tmp_path, f"import os; assert os.environ['WHO']; print(open({str(token)!r}).read())", version
    )
    token.write_text('{"status": {"token": "first"}}')

    async with kube_api() as kube:
        kube.tokens = {"first"}
        path = kubeconfig(tmp_path / "config", user, server=kube.url)
        async with seeing(kube, tmp_path, api=None, kubeconfig=str(path), namespaces=()) as seen:
            await seen.sees({})
            kube.tokens = {"second"}
            token.write_text('{"status": {"token": "second"}}')
            await kube.cut()
            await seen.until(lambda: kube.seen_tokens[-1] == "second", "logged in again")


@pytest.mark.real  # a process
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("print('{}')", "gave no token"),
        ("print('no JSON')", "gave no token"),
        ("import sys; sys.exit('not logged in')", "not logged in"),
    ],
)
async def test_a_login_plug_in_that_fails_says_why(tmp_path: Path, script: str, told: str) -> None:
    async with kube_api() as kube:
        path = kubeconfig(tmp_path / "config", plug_in(tmp_path, script), server=kube.url)
        async with seeing(kube, tmp_path, api=None, kubeconfig=str(path)) as seen:
            await seen.until(lambda: "access" in seen.source.stats.errors, "refused")
            assert told in seen.source.stats.last_error
            assert kube.seen_tokens == []


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ({"auth-provider": {"name": "gcp"}}, "auth-provider not supported"),
        ({"client-certificate": "nowhere.pem", "client-key": "x"}, "client's certificate"),
        ({"client-certificate": "nowhere.pem"}, "client's certificate"),
        ({"client-certificate-data": "%", "client-key-data": "%"}, "client's certificate"),
        ({"tokenFile": "nowhere"}, "token .*nowhere"),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, user: dict[str, Any], told: str) -> None:
    with pytest.raises(AccessError, match=told):
        make_client(read_kubeconfig(kubeconfig(tmp_path / "config", user)))


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"current-context": "x", "contexts": []}', "a: [b"])
def test_an_invalid_kubeconfig(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match=str(path)):
        read_kubeconfig(path)
    with pytest.raises(AccessError, match="nowhere"):
        read_kubeconfig(tmp_path / "nowhere")


@pytest.mark.real  # TLS
async def test_a_client_certificate_by_kubeconfig_over_real_tls(tmp_path: Path) -> None:
    certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    def data(name: str) -> str:
        return base64.b64encode((tmp_path / name).read_bytes()).decode()

    async with kube_api(context) as kube:
        path = kubeconfig(
            tmp_path / "config",
            {"client-certificate-data": data("server.crt"), "client-key-data": data("server.key")},
            server=kube.url,
            **{"certificate-authority-data": data("ca.crt")},
        )
        await kube.put(PODS, pod("a", "10.0.0.1"))
        async with seeing(kube, tmp_path, api=None, kubeconfig=str(path), namespaces=()) as seen:
            await seen.sees({"http://10.0.0.1:8000": ""})


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(1, 7))
def test_lines_come_whole_however_they_are_cut(lines: list[bytes], size: int) -> None:
    kept = [line.replace(b"\n", b"") for line in lines]
    stream = b"".join(line + b"\n" for line in kept) + b'{"half'
    splitter = LineSplitter()
    found = [line for at in range(0, len(stream), size) for line in splitter.feed(stream[at : at + size])]
    assert found == [line for line in kept if line.strip()]


def test_a_line_without_end_is_refused() -> None:
    splitter = LineSplitter(bytes_max=100)
    for _ in range(10):
        assert splitter.feed(b"x" * 10) == []
    with pytest.raises(BadAnswerError, match="over 100 bytes"):
        splitter.feed(b"x")
