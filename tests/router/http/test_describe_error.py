"""Failures are described in words: no log line or message shows the name of a Python class."""

from __future__ import annotations

import ast
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import run

CLASS_NAMES_ALLOWED = {
    # a fault of ours, shown with the request to report it: the name helps to find it
    "router/__main__.py",
    "router/tools/doctor/findings.py",
    "router/tools/doctor/listener.py",
    "router/prompts/tokenizer_finder.py",
}


def failure(url: str, *, timeout_s: float = 2.0) -> BaseException:
    """The error of a request to ``url``."""

    async def ask() -> BaseException:
        async with HttpClient() as client:
            try:
                async with client.exchange("GET", url, timeout_s) as answer:
                    await answer.body(1000)
            except OSError as error:
                return error
        raise AssertionError("it was answered")

    return run(ask())


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a port that accepts and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


@pytest.mark.real  # sockets of the kernel
def test_a_refused_port_a_silent_one_and_an_unknown_host(silent: str) -> None:
    port = free_port()
    assert describe_error(failure(f"http://127.0.0.1:{port}/")) == "connection refused"
    assert describe_error(failure(f"http://localhost:{port}/")) == "connection refused"  # IPv6 and IPv4
    assert describe_error(failure(silent, timeout_s=0.05)) == "no answer in time"
    assert describe_error(failure("http://no-such-host.invalid/")) == "host name not known"
    assert describe_error(failure(silent.replace("http", "https"), timeout_s=0.05)) == "no answer in time"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset"),
        (OSError(113, "No route to host"), "no route to host"),
        (OSError(98, "error while attempting to bind on address"), "address already in use; stop what "),
        (OSError(99, "error while attempting to bind on address"), "this machine has no such address"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 101] b"), "Multiple exceptions"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS failed: "),
        (msgspec.ValidationError("Expected `int`"), "JSON of another form (Expected `int`)"),
        (msgspec.DecodeError("malformed"), "not JSON"),
        (RecursionError(), "nested too deeply"),
        (KeyError("token"), "there is no 'token'"),
        (ValueError("the port is none"), "the port is none"),
        (ValueError("two\nlines"), "two lines"),
        (RuntimeError(), "failed without a reason"),
    ],
)
def test_words_without_a_class_name(error: Exception, words: str) -> None:
    assert describe_error(error).startswith(words)
    assert type(error).__name__ not in describe_error(error)


def names_of_classes(path: Path) -> Iterator[str]:
    """``type(error).__name__`` in a text, and errors printed as Python writes them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr == "__name__" and isinstance(node.value, ast.Call):
            called = node.value
            argument = ast.unparse(called.args[0]) if called.args else ""
            if ast.unparse(called.func) == "type" and argument in {"error", "problem", "exc", "reason"}:
                yield f"{path}:{node.lineno}"
        if not isinstance(node, ast.FormattedValue) or node.conversion != ord("r"):
            continue
        if ast.unparse(node.value) in {"error", "problem", "exc"}:
            yield f"{path}:{node.lineno}"


def test_no_message_of_the_router_names_a_class() -> None:
    files = (path for path in (ROOT / "router").rglob("*.py"))
    checked = [path for path in files if str(path.relative_to(ROOT)) not in CLASS_NAMES_ALLOWED]
    assert [place for path in checked for place in names_of_classes(path)] == []
