"""Certificate authorities and certificates for tests, made by openssl and valid for two days.

An authority is a proper one (RFC 5280: key usage, key identifiers), unless a test asks for an old one.
Nothing depends on the machine's own openssl.cnf.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_CONFIG = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[old_authority]
basicConstraints = CA:TRUE
[leaf]
basicConstraints = CA:FALSE
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1
[old_leaf]
subjectAltName = IP:127.0.0.1
"""


def make_authority(folder: Path, name: str = "ca", *, old: bool = False) -> None:
    """``NAME.crt`` and ``NAME.key``. An ``old`` one says neither key usage nor key identifier, as those of
    clusters made years ago: Python 3.13 refuses it where it verifies strictly."""
    (folder / "openssl.cnf").write_text(_CONFIG)
    section = "old_authority" if old else "authority"
    _openssl(folder, f"req -x509 -config openssl.cnf -extensions {section} {_new_key(name)} -subj /CN={name}")


def make_certificate(
    folder: Path, name: str, *, by: str = "ca", subject: str = "", old: bool = False
) -> None:
    """``NAME.crt`` and ``NAME.key`` for 127.0.0.1, server and client alike, by an authority of the folder."""
    _openssl(
        folder, f"req -config openssl.cnf {_new_key(name, 'csr')} -subj {subject or f'/O=ops/CN={name}'}"
    )
    _openssl(
        folder,
        f"x509 -req -in {name}.csr -CA {by}.crt -CAkey {by}.key -CAcreateserial -out {name}.crt -days 2 "
        f"-extfile openssl.cnf -extensions {'old_leaf' if old else 'leaf'}",
    )


def _new_key(name: str, kind: str = "crt") -> str:
    days = "-days 2 " if kind == "crt" else ""
    kept = f"-nodes -keyout {name}.key -out {name}.{kind}"
    return f"{days}-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 {kept}"


def _openssl(folder: Path, words: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
