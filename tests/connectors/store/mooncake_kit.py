"""A Mooncake master on this machine, and stores on it."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import mooncake.store
import pytest

from kvatlas.connectors.store.mooncake import MooncakeSettings, MooncakeStore, new_client
from tests.connectors.store.store_kit import Shared
from tests.support.ports import free_port


class Service:
    """The master with its metadata service over HTTP; every client lends 64 MiB over TCP."""

    def __init__(self) -> None:
        self.port, self.metadata_port = free_port(), free_port()
        program = Path(mooncake.store.__file__).parent / "mooncake_master"
        self._process = subprocess.Popen(
            [
                program,
                f"--port={self.port}",
                f"--metrics_port={free_port()}",
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_port={self.metadata_port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in (self.port, self.metadata_port):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert self._process.poll() is None, "the master ended immediately"
                    time.sleep(0.05)
        self.settings = MooncakeSettings(
            master=f"127.0.0.1:{self.port}",
            metadata=f"http://127.0.0.1:{self.metadata_port}/metadata",
            hostname="127.0.0.1",
            segment_bytes=64 << 20,
            buffer_bytes=16 << 20,
        )

    def open(self) -> MooncakeStore:
        return MooncakeStore(self.settings)

    def shared(self) -> Shared:
        plain = new_client()
        settings = self.settings
        assert (
            plain.setup(settings.hostname, settings.metadata, 64 << 20, 16 << 20, "tcp", "", settings.master)
            == 0
        )
        plain.remove_all(True)

        def overwrite(key: bytes, value: bytes) -> None:
            if not value:
                pytest.skip("Mooncake holds no empty values")
            plain.remove(key.hex(), True)
            assert plain.put(key.hex(), value) == 0

        return Shared(self.open, overwrite, plain.close)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
