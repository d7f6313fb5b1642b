"""A cluster of one machine for ``tests/support/reader.py``: what ``helm`` and ``kubectl`` of a page do there.

    python -m tests.support.cluster api|helm|kubectl WORDS...

``api`` is the stand-in API server with two pods of vLLM, and the Service's address. ``helm install`` renders
the chart's package by Helm's own engine and starts the router of its Deployment, with the rendered arguments
and configuration, as the kubelet would; ``kubectl`` knows that Deployment. Its ports are the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from tests.support.kube_api import PODS, FakeKube
from tests.support.kube_objects import pod

ENGINES = ("10.1.0.11", "10.1.0.12")
ENGINE_PORTS = {"http": 8100, "kv-events": 5557, "kv-replay": 5558}
SERVICE = "10.2.0.1"
SERVICE_NAME = "kvatlas.default.svc"
API_PORT = 6443
NAMESPACE = "default"
STATE = Path.home() / "cluster"
"""Where Helm's release is kept."""
_CONFIG = "/etc/kvatlas/config/kvatlas.toml"

Document = dict[str, Any]


async def api() -> None:
    """Serve until the machine is gone."""
    kube = FakeKube()
    kube.port = API_PORT
    await kube.start()
    for number, address in enumerate(ENGINES):
        await kube.put(PODS, pod(f"vllm-{number}", address, namespace=NAMESPACE, ports=ENGINE_PORTS))
    service = await asyncio.start_server(_forward, SERVICE, 80)
    await service.serve_forever()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    from_router, to_router = await asyncio.open_connection("127.0.0.1", 8000)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()

    await asyncio.gather(copy(reader, to_router), copy(from_router, writer))


def helm(words: list[str]) -> None:
    """``install NAME PACKAGE --set KEY=VALUE...`` and ``test NAME``."""
    if words[0] == "test":
        (container,) = _one("Pod")["spec"]["containers"]
        os.execvp(container["command"][0], container["command"])
    command, name, package, *options = words
    assert command == "install", words
    values: Document = {}
    for flag, setting in zip(options[::2], options[1::2], strict=True):
        assert flag == "--set", options
        key, _, value = setting.partition("=")
        *sections, last = key.split(".")
        table = values
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    with Chart.load(package) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace=NAMESPACE)
    documents = [
        one for path, text in files.items() if path.endswith(".yaml") for one in yaml.safe_load_all(text)
    ]
    STATE.mkdir()
    (STATE / "documents.json").write_text(json.dumps([one for one in documents if one]))
    _start()


def _start() -> None:
    """Start the Deployment's container; its files are below ``STATE``."""
    (config,) = [one["data"]["kvatlas.toml"] for one in _all("ConfigMap") if "kvatlas.toml" in one["data"]]
    container = _container()
    for mount in container["volumeMounts"]:
        config = config.replace(f'"{mount["mountPath"]}', f'"{STATE}{mount["mountPath"]}')
    (STATE / "kvatlas.toml").write_text(config)
    words = [word.replace(_CONFIG, str(STATE / "kvatlas.toml")) for word in map(str, container["args"])]
    environ = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    environ["HF_HOME"] = str(Path.home() / ".cache/huggingface")  # the volume, as if it had been downloaded
    environ["KVATLAS_FLEET_KUBERNETES_API"] = f"http://127.0.0.1:{API_PORT}"
    with Path("router.log").open("w") as log:
        started = subprocess.Popen(["kvatlas", *words], env={**os.environ, **environ}, stderr=log, stdout=log)
    (STATE / "pid").write_text(str(started.pid))


def _all(kind: str) -> list[Document]:
    return [one for one in json.loads((STATE / "documents.json").read_text()) if one["kind"] == kind]


def _one(kind: str) -> Document:
    (found,) = _all(kind)
    return found


def _container() -> Document:
    container: Document = _one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    return container


def kubectl(words: list[str]) -> None:
    """``rollout status``, ``port-forward`` and ``exec`` of what Helm installed."""
    name = _one("Deployment")["metadata"]["name"]
    ports = {one["name"]: one["containerPort"] for one in _container()["ports"]}
    match words:
        case ["rollout", "status", target]:
            assert target == f"deployment/{name}"
            probe = _container()["readinessProbe"]["httpGet"]
            _until_ready(f"http://127.0.0.1:{ports.get(probe['port'], probe['port'])}{probe['path']}")
        case ["port-forward", target, mapping]:
            here, _, there = mapping.partition(":")
            if target == f"service/{name}":
                (entry,) = [one for one in _one("Service")["spec"]["ports"] if str(one["port"]) == there]
                there = str(ports[entry["targetPort"]])
            else:
                assert target == f"deployment/{name}"
            assert here == (there or here), f"{mapping}: the port is {there} on this machine"
        case ["exec", target, "--", *command]:
            assert target == f"deployment/{name}"
            os.execvp(command[0], command)
        case _:
            raise SystemExit(f"kubectl {words}: not known here")


def _until_ready(url: str) -> None:
    while True:
        os.kill(int((STATE / "pid").read_text()), 0)  # fails where the router has ended
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            print(answer.status)
            return
        time.sleep(0.1)


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "api":
        asyncio.run(api())
    else:
        {"helm": helm, "kubectl": kubectl}[what](given)
