"""How the API server is reached: in a cluster, by kubeconfig, as configured; and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.settings import KubernetesSettings
from router.fleet.sources.kubernetes.access import Access, AccessError, find_access, read_kubeconfig
from router.fleet.sources.kubernetes.client import BadAnswerError, LineSplitter
from tests.router.fleet.sources.kubernetes.test_kube_source import certificates, seeing
from tests.support.kube_api import PODS, kube_api
from tests.support.kube_objects import pod

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def test_inside_a_cluster(tmp_path: Path) -> None:
    for name, text in (("token", "t0ken\n"), ("namespace", "serving\n")):
        (tmp_path / name).write_text(text)
    settings = KubernetesSettings(selector="a=b", credentials_dir=str(tmp_path))
    access = find_access(settings, IN_CLUSTER)
    assert access.base_url == "https://10.96.0.1:6443"
    assert access.namespace == "serving"
    assert access.headers() == {"authorization": "Bearer t0ken"}
    (tmp_path / "token").write_text("other")
    assert access.headers() == {"authorization": "Bearer other"}
    assert find_access(settings, {"KUBERNETES_SERVICE_HOST": "fd00::1"}).base_url == "https://[fd00::1]:443"


def test_outside_a_cluster_it_says_what_to_give() -> None:
    with pytest.raises(AccessError, match=r"give fleet\.kubernetes\.kubeconfig or fleet\.kubernetes\.api"):
        find_access(KubernetesSettings(selector="a=b"), {})


def test_a_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    for url, fine in (("http://10.0.0.1:8001", False), ("http://127.0.0.1:8001", True)):
        settings = KubernetesSettings(selector="a=b", api=url, credentials_dir=str(tmp_path))
        if fine:
            assert find_access(settings, {}).headers()
        else:
            with pytest.raises(AccessError, match="not sent without TLS"):
                find_access(settings, {})


@pytest.mark.parametrize("content", [None, "two\nlines", b"\xff\xfe"])
def test_a_token_of_no_use_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AccessError, match=str(path)):
        Access("https://a", token_file=path).headers()


def test_a_ca_of_no_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    for content in (None, "no certificate"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(AccessError, match=str(path)):
            Access("https://a", ca_file=path).tls()


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


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    access = read_kubeconfig(kubeconfig(tmp_path / "config", {"token": "t"}))
    assert (access.base_url, access.namespace) == ("https://k:6443", "serving")
    assert access.headers() == {"authorization": "Bearer t"}
    (tmp_path / "tok").write_text("beside")
    access = read_kubeconfig(kubeconfig(tmp_path / "config", {"tokenFile": "tok"}))
    assert access.headers() == {"authorization": "Bearer beside"}


def test_a_kubeconfig_in_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="kubeconfigs in YAML need PyYAML")
    path = tmp_path / "config"
    path.write_text(
        "current-context: here\ncontexts:\n- name: here\n  context: {cluster: c, user: u}\n"
        "clusters:\n- name: c\n  cluster: {server: 'https://k'}\nusers:\n- name: u\n  user: {token: t}\n"
    )
    assert read_kubeconfig(path).headers() == {"authorization": "Bearer t"}


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ({"exec": {"command": "aws"}}, "logs in by a plug-in"),
        ({"auth-provider": {"name": "gcp"}}, "kubectl proxy"),
        ({"client-certificate": "nowhere.pem", "client-key": "x"}, "nowhere.pem"),
        ({"client-certificate-data": "%", "client-key-data": "%"}, "not a kubeconfig that can be used"),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, user: dict[str, Any], told: str) -> None:
    with pytest.raises(AccessError, match=told):
        read_kubeconfig(kubeconfig(tmp_path / "config", user))


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"current-context": "x", "contexts": []}', "a: [b"])
def test_what_is_no_kubeconfig(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match=str(path)):
        read_kubeconfig(path)
    with pytest.raises(AccessError, match="nowhere"):
        read_kubeconfig(tmp_path / "nowhere")


def test_a_client_certificate_by_kubeconfig_over_real_tls(tmp_path: Path) -> None:
    certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.crt"))
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    def data(name: str) -> str:
        return base64.b64encode((tmp_path / name).read_bytes()).decode()

    async def main() -> None:
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

    asyncio.run(main())


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
