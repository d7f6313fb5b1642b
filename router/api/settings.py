"""Settings of the admin API; all defaults are here."""

from __future__ import annotations

import msgspec

from router.http.sockets import TlsFiles, check_tls_files


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The admin API, off by default. It needs a bearer token, a client certificate (mTLS), or both if both
    are set.

    A change made here lives in this one process and ends with it. Make it at each replica; make a lasting
    change in the engine file, or with a label or annotation in Kubernetes.
    """

    enabled: bool = False
    """Whether the admin API is served."""
    token_file: str | None = None
    """File with tokens of at least 16 characters, one per line, as `NAME:TOKEN` or `TOKEN`; the name is
    logged. Read again when it changes."""
    host: str = "127.0.0.1"
    """Address of the admin API's own port."""
    port: int | None = None
    """The admin API's own port (0 takes a free one). Not set: `/admin` on the router's port, with tokens
    only."""
    tls_cert_file: str | None = None
    """Certificate chain of the admin API's own port, PEM."""
    tls_key_file: str | None = None
    """Private key of that certificate, PEM."""
    client_ca_file: str | None = None
    """Certificate authority of clients, PEM: each client must present a certificate it signed; the common
    name is logged."""
    requests_per_minute: float = 60.0
    """Requests each name may make per minute, in bursts of up to a quarter of it; failed logins share one
    such allowance. Once it is used up, tokens from one address are compared only four times a second."""

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if self.token_file is None and self.client_ca_file is None:
            raise ValueError("enabled: give token_file, or client_ca_file with port and TLS files")
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.client_ca_file)
        if self.tls_cert_file is not None and self.port is None:
            raise ValueError("tls_cert_file: TLS needs a port of its own; give port")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: {self.port} is not a port number")

    @property
    def tls(self) -> TlsFiles:
        """TLS settings of the own port."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.client_ca_file)
