"""The flags of ``kvatlas epp`` that the light picker has too: its Deployments start this one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Kvatlas = Callable[..., subprocess.CompletedProcess[str]]


def test_the_light_pickers_flags(kvatlas: Kvatlas) -> None:
    """As conformance/resources/base.yaml of the Inference Extension has them."""
    flags = ["--pool-name", "primary", "--pool-namespace", "apps", "--zap-encoder", "json"]
    ports = ["--grpc-port", "9002", "--grpc-health-port", "9003"]
    told = kvatlas("epp", *flags, *ports, "--print-config")
    assert told.returncode == 0
    for line in (
        'fleet.kubernetes.inference_pool = "primary"',
        'fleet.kubernetes.namespaces = ["apps"]',
        'epp.listen = "0.0.0.0:9002"',
        'epp.health_listen = "0.0.0.0:9003"',
        'server.log_format = "json"',
    ):
        assert f"{line}  # flag" in told.stdout


def test_a_port_given_twice_is_an_error(kvatlas: Kvatlas) -> None:
    for port, address in (("--grpc-port", "--listen"), ("--grpc-health-port", "--health-listen")):
        told = kvatlas("epp", port, "9002", address, "127.0.0.1:1", "--print-config")
        assert told.returncode != 0
        assert f"{port} 9002 and {address} 127.0.0.1:1: give one of them" in told.stderr
