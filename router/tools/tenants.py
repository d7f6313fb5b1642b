"""Tools for tenants: ``kvatlas invoice`` (tokens and prices by tenant) and ``kvatlas keys`` (a key file).

Usage records are read in one pass and summed as integers; prices are decimal, per million tokens, and a total
is the exact sum of its rows. Each line counts once, also in a record that a router is writing.

A key is printed once, on standard output, and nowhere else; the file stores its digest. The file is replaced
atomically and readable by its owner only, so a router never reads a partial file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.table import Table

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
from kvatlas.router.observe.usage import UsageLine, all_files
from kvatlas.router.tools.ops_client import make_table, output_console

# Priced token kinds: prompt tokens computed, prompt tokens taken from each tier, and generated tokens.
PRICED = ("computed", "device", "host", "store", "generated")
GROUPS = ("tenant", "key", "model", "engine")
_MILLION = 1_000_000
_decoder = msgspec.json.Decoder(UsageLine)


class InvoiceOptions(msgspec.Struct, frozen=True):
    """Arguments of ``kvatlas invoice``, as given."""

    paths: Sequence[Path]
    prices: Sequence[str]
    since: str | None
    until: str | None
    by: str


class InvoiceRow(msgspec.Struct):
    """Sums over the requests of one tenant, or of the group selected by ``--by``."""

    requests: int = 0
    """Requests that an engine answered successfully, or was computing when the client disconnected."""
    not_served: int = 0
    unreported: int = 0
    """Number of those whose engine reported no tokens."""
    contradicted: int = 0
    """Number of those whose reported cached tokens contradict the index."""
    tokens: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PRICED, 0))

    def add(self, line: UsageLine) -> None:
        served = 200 <= line.status < 300 or line.outcome == "unseen"
        if not served and not (line.outcome == "client_gone" and line.engine):
            self.not_served += 1
            return
        self.requests += 1
        self.unreported += line.prompt_tokens is None
        self.contradicted += line.verified is False
        counts = (
            line.computed_tokens,
            line.device_tokens,
            line.host_tokens,
            line.store_tokens,
            line.generated_tokens,
        )
        for name, count in zip(PRICED, counts, strict=True):
            self.tokens[name] += count or 0

    def amount(self, prices: dict[str, Decimal]) -> Decimal:
        return sum((prices[name] * self.tokens[name] / _MILLION for name in prices), Decimal(0))


def run_invoice(options: InvoiceOptions, *, as_json: bool) -> int:
    """Print the invoice. Raises ``ConfigError`` for unusable arguments or lines."""
    prices = _prices(options.prices)
    since_s, until_s = _moment("--since", options.since), _moment("--until", options.until)
    by = tuple(name.strip() for name in options.by.split(","))
    for name in by:
        if name not in GROUPS:
            raise ConfigError(f"--by {options.by}: {name!r}: expected some of {', '.join(GROUPS)}")
    rows: dict[tuple[str, ...], InvoiceRow] = {}
    if not options.paths:
        raise ConfigError("give at least one usage record: a file that a router writes (usage.path)")
    for line in _lines(options.paths):
        if (since_s is None or line.arrived_s >= since_s) and (until_s is None or line.arrived_s < until_s):
            key = tuple(getattr(line, name) for name in by)
            rows.setdefault(key, InvoiceRow()).add(line)
    found = dict(sorted(rows.items()))
    if as_json:
        print(msgspec.json.encode(_report(by, found, prices)).decode())
    else:
        output_console().print(_table(by, found, prices))
    return 0


def _report(
    by: tuple[str, ...], rows: dict[tuple[str, ...], InvoiceRow], prices: dict[str, Decimal]
) -> dict[str, object]:
    found = [
        {**dict(zip(by, key, strict=True)), **msgspec.to_builtins(row), "amount": str(row.amount(prices))}
        for key, row in rows.items()
    ]
    return {"rows": found, "total": str(_total(rows, prices))}


def _table(by: tuple[str, ...], rows: dict[tuple[str, ...], InvoiceRow], prices: dict[str, Decimal]) -> Table:
    columns = ("requests", *PRICED, "unreported", "contradicted", "amount")
    table = make_table(*by, *[f">{name}" for name in columns])
    for key, row in rows.items():
        counts = (row.requests, *row.tokens.values(), row.unreported, row.contradicted)
        table.add_row(*(text or "-" for text in key), *map(str, counts), f"{row.amount(prices):.4f}")
    table.add_section()
    blank = [""] * (len(by) - 1 + 1 + len(PRICED) + 2)
    table.add_row("total", *blank, f"{_total(rows, prices):.4f}")
    return table


def _total(rows: dict[tuple[str, ...], InvoiceRow], prices: dict[str, Decimal]) -> Decimal:
    return sum((row.amount(prices) for row in rows.values()), Decimal(0))


def _lines(paths: Sequence[Path]) -> Iterator[UsageLine]:
    for path in paths:
        with ExitStack() as stack:
            for file in _opened(path, stack):
                for number, text in enumerate(file, 1):
                    if not text.endswith(b"\n"):
                        # incomplete: a router is writing it.
                        break
                    try:
                        yield _decoder.decode(text)
                    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                        where = f"{file.name}:{number}"
                        raise ConfigError(f"{where}: not a line of a usage record: {error}") from None


def _opened(path: Path, stack: ExitStack) -> list[BinaryIO]:
    """Open all files of a record between two rotations: once open, they may be renamed."""
    while True:
        with ExitStack() as tried:
            try:
                files = [tried.enter_context(file.open("rb")) for file in all_files(path)]
                now = [(file.stat().st_dev, file.stat().st_ino) for file in all_files(path)]
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}") from None
            if not files:
                raise ConfigError(f"{path}: there is no such usage record (usage.path of a router)")
            seen = [os.fstat(file.fileno()) for file in files]
            if now == [(one.st_dev, one.st_ino) for one in seen]:
                stack.push(tried.pop_all())
                return list(files)


def _prices(texts: Sequence[str]) -> dict[str, Decimal]:
    prices: dict[str, Decimal] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            price = Decimal(value)
        except InvalidOperation:
            price = Decimal(-1)
        if name not in PRICED or not price.is_finite() or price < 0:
            raise ConfigError(
                f"--price {text!r}: expected NAME=PRICE, the price per million tokens, NAME one of "
                f"{', '.join(PRICED)}"
            )
        prices[name] = price
    return prices


def _moment(flag: str, text: str | None) -> float | None:
    """Parse a date or time, in UTC unless it names a zone, into Unix time."""
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected a date or time such as 2026-11-01") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return moment.timestamp()


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
