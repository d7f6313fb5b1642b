"""Health check of a container's process: ``python -m kvatlas.router.health_check``, for Docker's HEALTHCHECK.

``serve`` and ``epp`` serve ``/health`` on the ops port; ``serve`` also on the public one, over TLS if
configured. The ports are read from the arguments of process 1, its environment and
its configuration file, the sources of ``router/config/load.py``. Imports only the standard library: Docker
runs it every ten seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_DEFAULTS = {"host": "127.0.0.1", "port": "8000", "ops_host": "127.0.0.1", "ops_port": "9001"}
_KEYS = (*_DEFAULTS, "tls_cert_file")
_TIMEOUT_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  # wildcard addresses are checked on loopback


def main() -> int:
    """Return 0 if ``/health`` answers, 1 if not."""
    words = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    return 0 if any(map(_answers, urls(words, os.environ))) else 1


def urls(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the URLs of ``/health`` to try, in order."""
    found = {**_DEFAULTS, **_of_file(words), **_of_environment(environ), **dict(_flags(words))}
    ops, scheme = found["ops_port"], "https" if found.get("tls_cert_file") else "http"
    asked = [] if ops in {"off", "public"} else [f"http://{_at(found['ops_host'])}:{ops}/health"]
    if "epp" not in words:  # the picker has no public port
        asked.append(f"{scheme}://{_at(found['host'])}:{found['port']}/health")
    return asked


def _at(host: str) -> str:
    return _ANY.get(host, f"[{host}]" if ":" in host else host)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    names = {"--host": "host", "--port": "port", "--ops-port": "ops_port"}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals:
            value = words[number + 1] if number + 1 < len(words) else ""
        if name in names:
            yield names[name], value
        key, _, value = value.partition("=")
        if name == "--set" and key.startswith("server.") and key.removeprefix("server.") in _KEYS:
            yield key.removeprefix("server."), value


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    named = {key: environ.get(f"KVATLAS_SERVER_{key.upper()}") for key in _KEYS}
    return {key: value for key, value in named.items() if value}


def _of_file(words: Sequence[str]) -> dict[str, str]:
    """Read the settings of the file; none if it is unreadable, which the process itself reports."""
    path = ""
    for number, word in enumerate(words):
        if word == "--config" and number + 1 < len(words):
            path = words[number + 1]
        elif word.startswith("--config="):
            path = word.partition("=")[2]
    try:
        tree: Any = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        return {key: str(value) for key, value in tree.get("server", {}).items() if key in _KEYS}
    except (OSError, ValueError, AttributeError):
        return {}


def _answers(url: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's authorities would take 20 ms to read
    context.check_hostname = False  # connects to loopback, whatever name the certificate has
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
