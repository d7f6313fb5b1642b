"""Certificate of a picker without a configured one: made at the start by openssl, valid for ten years."""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from pathlib import Path

from kvatlas.router.http.tls import TlsError, TlsFiles, server_context

_MAKE = (
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "3650",
    "-subj",
    "/CN=kvatlas-epp",
    "-keyout",
    "key.pem",
    "-out",
    "cert.pem",
)
_MAKE_S_MAX = 30.0


def self_signed() -> ssl.SSLContext:
    """Return a context with a self-signed certificate. Raises ``TlsError``."""
    remedy = "give epp.tls_cert_file and epp.tls_key_file, or set epp.tls = false"
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(  # noqa: S603  # fixed arguments, of an own folder
                _MAKE, cwd=folder, check=True, capture_output=True, timeout=_MAKE_S_MAX
            )
        except FileNotFoundError:
            raise TlsError(
                f"epp.tls: a certificate is made by openssl, which is not installed; {remedy}"
            ) from None
        except (OSError, subprocess.SubprocessError) as error:
            raise TlsError(f"epp.tls: openssl made no certificate ({error}); {remedy}") from None
        files = TlsFiles(str(Path(folder, "cert.pem")), str(Path(folder, "key.pem")))
        return server_context(files, "epp.tls")
