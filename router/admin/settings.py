"""Whether there is an admin API, where it listens, and who may use it; all defaults live here."""

from __future__ import annotations

import msgspec


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Off by default. Wants a bearer token, a client certificate (mTLS), or both where both are configured.

    What is changed here belongs to this one process and ends with it: several replicas are told one by one,
    and what is to last is written into the engine file, or as a label or annotation in Kubernetes.
    """

    enabled: bool = False
    token_file: str | None = None
    """Tokens of at least 16 characters, one per line, as `NAME:TOKEN` or alone; the name goes into the log.
    Read again when it changes."""
    host: str = "127.0.0.1"
    """Address of the separate port."""
    port: int | None = None
    """A port of its own (0 takes a free one). Not set: `/admin` on the router's port, for tokens only."""
    tls_cert_file: str | None = None
    """Certificate chain of the separate port, PEM."""
    tls_key_file: str | None = None
    client_ca_file: str | None = None
    """Clients must show a certificate of this authority; its common name goes into the log."""
    requests_per_minute: float = 60.0
    """For each name, in bursts of up to a quarter of it; failed logins have one such allowance together.
    Once it is used up, tokens from one address are compared four times a second only."""

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if self.token_file is None and self.client_ca_file is None:
            raise ValueError("enabled: give token_file, or client_ca_file with port and TLS files")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: a certificate and its key go together; give tls_key_file too")
        if self.tls_cert_file is not None and self.port is None:
            raise ValueError("tls_cert_file: TLS needs a port of its own; give port")
        if self.client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("client_ca_file: needs tls_cert_file and tls_key_file")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: {self.port} is not a port number")
