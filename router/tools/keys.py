"""``kvatlas keys``: the key file of tenants.

A key is printed once, on standard output, and nowhere else; the file stores its digest. The file is replaced
atomically and readable by its owner only, so a router never reads a partial file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from kvatlas.router.admission.key_file import (
    KEY_ID_DIGITS,
    KeyFileError,
    TenantRules,
    check_tenant_name,
    digest_of,
    new_key,
    read_key_file,
)
from kvatlas.router.config.errors import ConfigError

_KEY_LENGTH_MIN = 16
_HEAD = """\
# Keys of kvatlas (docs/tenants.md). Routers read this file again when it changes.
# Limits of a tenant: models, requests_per_minute, uncached_tokens_per_minute, concurrent_requests.
"""


def run_add(path: Path, *, tenant: str, name: str, stdin: bool) -> int:
    """Add a key. Raises ``ConfigError`` for an unusable name, key or file; the file is then unchanged."""
    try:
        check_tenant_name(tenant, "--tenant")
        known = read_key_file(path, "--file") if path.exists() else None
    except KeyFileError as error:
        raise ConfigError(str(error)) from None
    if not name.isprintable() or len(name) > 200:
        raise ConfigError(f"--name {name!r}: expected up to 200 printable characters")
    key = _given() if stdin else new_key()
    digest = digest_of(key)
    if known is not None and any(entry.sha256 == digest for entry in known.keys):
        raise ConfigError(f"--file {path}: this key exists already")
    text = path.read_text(encoding="utf-8").rstrip() + "\n" if known is not None else _HEAD
    if known is None or tenant not in known.tenants:
        text += f"\n[tenants.{_quoted(tenant)}]\n"
    named = f"name = {_quoted(name)}\n" if name else ""
    text += f"\n[[keys]]\ntenant = {_quoted(tenant)}\n{named}sha256 = {_quoted(digest)}\n"
    _replace(path, text)
    if stdin:
        print(f"added a key of {tenant} to {path}", file=sys.stderr)
    else:
        print(key)
        print(f"added a new key of {tenant} to {path}; it is shown only once", file=sys.stderr)
    return 0


def run_list(path: Path) -> int:
    """List the keys of a file. Raises ``ConfigError`` if routers would refuse it."""
    try:
        table = read_key_file(path, "--file")
    except KeyFileError as error:
        raise ConfigError(str(error)) from None
    for tenant, rules in sorted(table.tenants.items()):
        unset = msgspec.to_builtins(TenantRules())
        fields = msgspec.to_builtins(rules)
        models = ", ".join(fields.pop("models"))
        limits = {key: value for key, value in fields.items() if value != unset[key]}
        shown = ", ".join(f"{key} = {value}" for key, value in limits.items()) or "no limits"
        print(f"{tenant}: models {models}; {shown}")
        for entry in table.keys:
            if entry.tenant == tenant:
                print(f"  sha256 {entry.sha256[:KEY_ID_DIGITS]}...  {entry.name}".rstrip())
    return 0


def _given() -> str:
    key = sys.stdin.readline(4096).strip()
    if len(key) < _KEY_LENGTH_MIN or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"--stdin: a key is one line of at least {_KEY_LENGTH_MIN} printable characters without spaces"
        )
    return key


def _quoted(text: str) -> str:
    """Quote as a TOML string: JSON strings are valid TOML strings."""
    return msgspec.json.encode(text).decode()


def _replace(path: Path, text: str) -> None:
    try:
        number, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"--file {path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            os.chmod(draft, path.stat().st_mode & 0o777)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
