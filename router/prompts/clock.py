"""The engines' local time, which some prompts contain."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


def local_time(time_zone: str | None) -> datetime:
    """Now, as an engine with this time zone has it (naive); None: as this machine."""
    zone = None if time_zone is None else zone_of(time_zone)
    return datetime.now(zone).replace(tzinfo=None)


def zone_of(name: str) -> tzinfo:
    """An IANA time zone. Raises ``ValueError`` where none of that name is known here."""
    if name == "UTC":
        return UTC  # without the system's data
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, ZoneInfoNotFoundError):
        raise ValueError("no time zone of this name is known here") from None
