"""The error of a configuration that cannot be used."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key and the remedy."""
