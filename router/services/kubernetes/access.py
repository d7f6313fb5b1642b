"""Address of the API server, trusted CA and credentials: inside a cluster, by kubeconfig, or as configured.

lightkube reads kubeconfigs and logs in. Invariants: a token is read again when it was refused, and the CA
for every request, since both are rotated; a token is never sent unencrypted to another machine.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import yaml
from lightkube import ConfigError, KubeConfig, SingleConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.models import Cluster, User

from kvatlas.router.fleet.engines import CannotStartError
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.http.error_texts import describe_error

_TOKEN_BYTES_MAX = 64 * 1024
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
# Login plug-in of an API version that lightkube does not know; the token is at the same place in its answer.
_EXEC_VERSIONS = {"client.authentication.k8s.io/v1": "client.authentication.k8s.io/v1beta1"}


class AccessError(CannotStartError):
    """The API server cannot be queried; the message names the key or file, and the remedy."""


def find_access(settings: KubernetesSettings, environ: Mapping[str, str] = os.environ) -> SingleConfig:
    """Return the access to the API server. Raises ``AccessError``."""
    if settings.kubeconfig is not None:
        return read_kubeconfig(Path(settings.kubeconfig).expanduser())
    folder = Path(settings.credentials_dir)
    token, authority, namespace = folder / "token", folder / "ca.crt", folder / "namespace"
    server = settings.api
    if server is None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise AccessError(
                "fleet.kubernetes: not inside a cluster (KUBERNETES_SERVICE_HOST is not set); "
                "give fleet.kubernetes.kubeconfig or fleet.kubernetes.api"
            )
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    own = namespace.read_text(encoding="utf-8").strip() if namespace.is_file() else ""
    config = KubeConfig.from_one(
        cluster=Cluster(server=server, certificate_auth=str(authority) if authority.is_file() else None),
        user=User(token_file=str(token) if token.is_file() else None),
        namespace=own or None,
    )
    return _checked(config.get())


def read_kubeconfig(path: Path) -> SingleConfig:
    """Read the current context of a kubeconfig. Raises ``AccessError``."""
    try:
        config = KubeConfig.from_file(path).get()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AccessError(f"fleet.kubernetes.kubeconfig: {path}: {describe_error(error)}") from None
    except (ConfigError, msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise AccessError(f"{path}: not a kubeconfig that can be used: {describe_error(error)}") from None
    return _checked(config)


def _checked(config: SingleConfig | None) -> SingleConfig:
    if config is None:
        raise AccessError("fleet.kubernetes.kubeconfig: it has no current context")
    user, url = config.user or User(), urlsplit(config.cluster.server)
    secret = user.token or user.token_file or user.exec or user.password
    if secret and url.scheme != "https" and url.hostname not in _LOOPBACK:
        raise AccessError(f"{config.cluster.server}: a token is not sent without TLS; give an https:// URL")
    # Lightkube would resolve it against the working directory.
    if user.token_file:
        user = msgspec.structs.replace(user, token_file=str(config.abs_file(user.token_file)))
        _check_token(Path(user.token_file or ""))
    if user.exec and user.exec.apiVersion in _EXEC_VERSIONS:
        login = msgspec.structs.replace(user.exec, apiVersion=_EXEC_VERSIONS[user.exec.apiVersion])
        user = msgspec.structs.replace(user, exec=login)
    # Without TLS lightkube need not read the system's CA certificates, which take 10 MiB.
    plain = url.scheme != "https"
    cluster = msgspec.structs.replace(config.cluster, insecure=config.cluster.insecure or plain)
    return config._replace(user=user, cluster=cluster)


def _check_token(path: Path) -> None:
    try:
        with path.open("rb") as file:
            token = file.read(_TOKEN_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"token {path}: {describe_error(error)}") from None
    if not token.isprintable():
        raise AccessError(f"token {path}: not one line of text")


def read_authority(config: SingleConfig) -> bytes:
    """Return the CA file's current content; empty if none is configured. Raises ``AccessError``."""
    name = config.cluster.certificate_auth
    try:
        return Path(config.abs_file(name)).read_bytes() if name else b""
    except OSError as error:
        raise AccessError(f"CA {name}: {error}") from None


def verifying(config: SingleConfig) -> ssl.SSLContext:
    """Return a context that verifies chain and name like kubectl does. Raises ``AccessError``."""
    # It is not as strict as RFC 5280, Python 3.13's default, which refuses the CAs of older clusters because
    # they lack a key usage or an identifier.
    try:
        context = verify_cluster(config.cluster, config.user or User(), config.abs_file, trust_env=False)
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError is an OSError
        named = config.cluster.certificate_auth or "of the kubeconfig"
        raise AccessError(f"CA {named} or the client's certificate: {error}") from None
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
