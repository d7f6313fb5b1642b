"""Whether clients need keys, and what becomes of them; all defaults live here."""

from __future__ import annotations

import msgspec


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of clients. Without a file nobody needs one, and ``Authorization`` is passed on to engines."""

    file: str | None = None
    """TOML file with tenants, their limits, and the SHA-256 of each key; `kvatlas keys add` writes it
    ([tenants.md](tenants.md)). Read again when it changes. Every request to an engine, and `/v1/models`, then
    needs a key: `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    engine_priorities: bool = False
    """Engines schedule by priority (vLLM's `--scheduling-policy priority`): requests of tenants of the class
    `low` get `priority` 1, of `high` -1, where their bodies have none. `policy.engine_priority` does so."""
    forward: bool = False
    """Pass the client's key on to engines. By default it is taken out, and `fleet.api_key_file` is sent where
    that is set."""
