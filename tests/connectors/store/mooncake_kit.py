"""A Mooncake master on this machine, and stores on it."""

from __future__ import annotations

import socket
import subprocess
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from kvatlas.connectors.store.mooncake import MooncakeSettings, MooncakeStore, new_client
from tests.connectors.store.store_kit import Shared
from tests.support.ports import free_ports


class Service:
    """The master with its metadata service over HTTP; every client lends 64 MiB over TCP."""

    def __init__(self, program: Path) -> None:
        """``program``: ``mooncake_master`` of the wheel."""
        port, metadata_port, self.http_port = free_ports(3)
        self._process = subprocess.Popen(
            [
                program,
                f"--port={port}",
                f"--metrics_port={self.http_port}",
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_port={metadata_port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (port, metadata_port, self.http_port):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", one)).close()
                    break
                except OSError:
                    assert self._process.poll() is None, "the master ended immediately"
                    time.sleep(0.05)
        self.settings = MooncakeSettings(
            master=f"127.0.0.1:{port}",
            metadata=f"http://127.0.0.1:{metadata_port}/metadata",
            hostname="127.0.0.1",
            segment_bytes=64 << 20,
            buffer_bytes=16 << 20,
        )

    def open(self) -> MooncakeStore:
        return MooncakeStore(self.settings)

    @cached_property
    def plain(self) -> Any:
        """A client for what is done behind a store's back. To close one takes seconds: all tests share it."""
        client, settings = new_client(), self.settings
        status = client.setup(
            settings.hostname, settings.metadata, 64 << 20, 16 << 20, "tcp", "", settings.master
        )
        assert status == 0
        return client

    def shared(self) -> Shared:
        plain = self.plain
        plain.remove_all(True)

        def overwrite(key: bytes, value: bytes) -> None:
            if not value:
                pytest.skip("Mooncake holds no empty values")
            plain.remove(key.hex(), True)
            assert plain.put(key.hex(), value) == 0

        return Shared(self.open, overwrite)

    def close(self) -> None:
        if "plain" in vars(self):
            self.plain.close()
        self._process.kill()
        self._process.wait()
