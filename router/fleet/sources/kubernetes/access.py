"""Where the API server is, whom it trusts and who we are: inside a cluster, by kubeconfig, or as configured.

Always true: the token and the CA are read anew for every request, since both are rotated; a token is never
sent unencrypted to another machine.
"""

from __future__ import annotations

import base64
import importlib
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.fleet.settings import KubernetesSettings

_TOKEN_BYTES_MAX = 64 * 1024
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class AccessError(Exception):
    """The API server cannot be asked; the message names the key or file, and the remedy."""


class Access:
    """See the module. Files may be missing until they are needed."""

    def __init__(
        self,
        base_url: str,
        *,
        token_file: Path | None = None,
        token: str = "",
        ca_file: Path | None = None,
        ca_data: str = "",
        client_cert: tuple[bytes, bytes] | None = None,
        namespace: str = "default",
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.namespace = namespace
        self._token_file = token_file
        self._token = token
        self._ca_file = ca_file
        self._ca_data = ca_data
        self._client_cert = client_cert
        self._context: tuple[object, ssl.SSLContext] | None = None
        parts = urlsplit(base_url)
        self._secure = parts.scheme == "https"
        if not self._secure and (token or token_file) and parts.hostname not in _LOOPBACK:
            raise AccessError(f"{base_url}: a token is not sent without TLS; give an https:// URL")

    def headers(self) -> dict[str, str]:
        """What a request carries now. Raises ``AccessError``."""
        token = self._token
        if self._token_file is not None:
            try:
                with self._token_file.open("rb") as file:
                    token = file.read(_TOKEN_BYTES_MAX).decode().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise AccessError(f"token {self._token_file}: {error}") from None
        if token and not token.isprintable():
            raise AccessError(f"token {self._token_file}: not one line of text")
        return {"authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        """For a new connection; the same one while the CA's file stays the same. Raises ``AccessError``."""
        if not self._secure:
            return True
        try:
            stamp = None if self._ca_file is None else self._ca_file.read_bytes()
            if self._context is None or self._context[0] != stamp:
                data = self._ca_data or (None if stamp is None else stamp.decode())
                context = _verifying(data)
                if self._client_cert is not None:
                    _load_chain(context, *self._client_cert)
                self._context = stamp, context
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise AccessError(f"CA {self._ca_file}: {error}") from None
        return self._context[1]


def find_access(settings: KubernetesSettings, environ: Mapping[str, str] = os.environ) -> Access:
    """How to reach the API server. Raises ``AccessError``."""
    if settings.kubeconfig is not None:
        return read_kubeconfig(Path(settings.kubeconfig).expanduser())
    folder = Path(settings.credentials_dir)
    token_file, ca_file, namespace = folder / "token", folder / "ca.crt", folder / "namespace"
    base_url = settings.api
    if base_url is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise AccessError(
                "fleet.kubernetes: not inside a cluster (KUBERNETES_SERVICE_HOST is not set); "
                "give fleet.kubernetes.kubeconfig or fleet.kubernetes.api"
            )
        base_url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    own = ""
    if namespace.is_file():
        own = namespace.read_text(encoding="utf-8").strip()
    return Access(
        base_url,
        token_file=token_file if token_file.is_file() else None,
        ca_file=ca_file if ca_file.is_file() else None,
        namespace=own or "default",
    )


def read_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig. Raises ``AccessError``."""
    tree = _read_tree(path)
    try:
        name = tree.get("current-context") or ""
        context = _named(tree, "contexts", name)["context"]
        cluster = _named(tree, "clusters", context["cluster"])["cluster"]
        user = _named(tree, "users", context["user"])["user"] or {}
        if "exec" in user or "auth-provider" in user:
            raise AccessError(
                f"{path}: context {name!r} logs in by a plug-in, which is not supported; run `kubectl proxy` "
                "and give fleet.kubernetes.api = http://127.0.0.1:8001, or use a service account's token"
            )
        return Access(
            cluster["server"],
            token=user.get("token", ""),
            token_file=_beside(path, user.get("tokenFile")),
            ca_file=_beside(path, cluster.get("certificate-authority")),
            ca_data=base64.b64decode(cluster.get("certificate-authority-data", ""), validate=True).decode(),
            client_cert=_client_cert(path, user),
            namespace=context.get("namespace") or "default",
        )
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        what = f"{type(error).__name__}: {error}"
        raise AccessError(f"{path}: not a kubeconfig that can be used: {what}") from None


def _read_tree(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"fleet.kubernetes.kubeconfig: {path}: {error}") from None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise AccessError(
            f"fleet.kubernetes.kubeconfig: {path} is YAML, and PyYAML is not installed; install it, or write "
            "JSON: kubectl config view --raw --minify -o json"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise AccessError(f"fleet.kubernetes.kubeconfig: {path}: {error}") from None


def _named(tree: Any, kind: str, name: str) -> Any:
    for entry in tree.get(kind) or ():
        if entry.get("name") == name:
            return entry
    raise KeyError(f"{kind}: no {name!r}")


def _beside(path: Path, name: str | None) -> Path | None:
    return None if not name else path.parent / name


def _client_cert(path: Path, user: Any) -> tuple[bytes, bytes] | None:
    """Certificate and key, as PEM."""
    given = []
    for name in ("client-certificate", "client-key"):
        file, data = _beside(path, user.get(name)), user.get(f"{name}-data")
        if data:
            given.append(base64.b64decode(data, validate=True))
        else:
            given.append(b"" if file is None else file.read_bytes())
    cert, key = given
    return (cert, key) if cert and key else None


def _verifying(authority: str | None) -> ssl.SSLContext:
    """Chain and name are verified as kubectl does: not strictly by RFC 5280, which Python 3.13 would do by
    default and which refuses the authorities of older clusters for want of a key usage or an identifier."""
    context = ssl.create_default_context(cadata=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _load_chain(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """The ssl module takes files only: private ones, gone at once."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-") as folder:
        files = Path(folder, "cert.pem"), Path(folder, "key.pem")
        for file, content in zip(files, (cert, key), strict=True):
            file.write_bytes(content)
        context.load_cert_chain(*files)
