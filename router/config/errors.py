"""The error of an unusable configuration."""


class ConfigError(ValueError):
    """An unusable setting; the message names the key and the remedy."""
