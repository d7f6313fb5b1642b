from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors.settings import ConfigError
from connectors.store.base import StoreUnavailable
from connectors.store.open import open_store


def test_a_file_store_by_its_settings(tmp_path: Path) -> None:
    store = open_store(
        {"kind": "file", "path": str(tmp_path / "blocks"), "max_bytes": "1MiB", "name": "fast"}
    )
    assert store.name == "fast"
    value = memoryview(b"value")
    assert store.put([(b"key", value)], 5.0) == [True]
    other = open_store({"kind": "file", "path": str(tmp_path / "blocks")}, lookup_only=True)
    assert other.exists([b"key", b"another"], 5.0) == [True, False]
    store.close()
    other.close()


@pytest.mark.parametrize(
    ("config", "key", "remedy"),
    [
        (None, "store", "mapping"),
        ("file", "store", "mapping"),
        ({}, "store.kind", "given"),
        ({"kind": "ftp"}, "store.kind", "file, mooncake, redis"),
        ({"kind": "file"}, "store.path", "given"),
        ({"kind": "file", "path": "relative"}, "store.path", "absolute"),
        ({"kind": "file", "path": "/x", "max_bytes": 0}, "store.max_bytes", "positive"),
        ({"kind": "file", "path": "/x", "sweep_every_s": "soon"}, "store.sweep_every_s", "number"),
        ({"kind": "file", "path": "/x", "urll": "?"}, "store.urll", "no such setting"),
        ({"kind": "redis"}, "store.url", "given"),
        ({"kind": "redis", "url": "http://host"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://host:port"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://host/zero"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "unix://"}, "store.url", "redis://HOST"),
        ({"kind": "redis", "url": "redis://h", "connections": 0}, "store.connections", "from 1"),
        ({"kind": "redis", "url": "redis://h", "connections": 2.5}, "store.connections", "whole"),
        ({"kind": "redis", "url": "redis://h", "password": "x"}, "store.password", "password_file"),
        ({"kind": "redis", "url": "redis://h", "password_file": "/none"}, "store.password_file", "read"),
        ({"kind": "redis", "url": "rediss://h", "ca_file": __file__}, "store.ca_file", "PEM"),
        ({"kind": "mooncake"}, "store.master", "given"),
        ({"kind": "mooncake", "master": "h:1", "protocol": "udp"}, "store.protocol", "tcp, rdma"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config: Any, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_store(config)
    assert refusal.value.key == key
    assert remedy in str(refusal.value)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password_file") as refusal:
        open_store({"kind": "redis", "url": "redis://me:secret@host/0"})
    assert "secret" not in str(refusal.value)


def test_a_directory_that_cannot_be_made_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file/blocks"):
        open_store({"kind": "file", "path": str(tmp_path / "file" / "blocks")})


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed here")
def test_without_mooncake_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        open_store({"kind": "mooncake", "master": "127.0.0.1:1"})


def test_opening_one_kind_imports_no_other(tmp_path: Path) -> None:
    before = {name for name in sys.modules if name.startswith("connectors.store.")}
    for name in ("connectors.store.redis", "connectors.store.mooncake"):
        before.discard(name)
        sys.modules.pop(name, None)
    open_store({"kind": "file", "path": str(tmp_path / "blocks")}).close()
    assert "connectors.store.redis" not in sys.modules
    assert "connectors.store.mooncake" not in sys.modules
