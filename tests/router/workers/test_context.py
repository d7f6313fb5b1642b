"""What the parent opens for its workers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from router.workers.context import PortTakenError, WorkerSockets, cores


def test_a_port_that_somebody_has_is_refused_also_if_it_may_be_shared() -> None:
    first = WorkerSockets(2, ("127.0.0.1", 0))
    try:
        port = first.public[0][0].getsockname()[1]
        assert [copy[0].getsockname()[1] for copy in first.public] == [port, port]
        with pytest.raises(PortTakenError, match=rf"server.port: cannot listen on 127.0.0.1:{port}"):
            WorkerSockets(2, ("127.0.0.1", port))
        with pytest.raises(PortTakenError, match=r"server.ops_port"):
            WorkerSockets(2, ("127.0.0.1", 0), ops=("127.0.0.1", port))
    finally:
        first.close()
    assert not first.folder.exists()


def test_a_worker_keeps_its_own_sockets_and_closes_all_others() -> None:
    sockets = WorkerSockets(3, ("127.0.0.1", 0), ops=("127.0.0.1", 0))
    try:
        public, control = [copy[0] for copy in sockets.public], sockets.folder / "1"
        worker = sockets.open_worker(1, 0, lambda: None, -1)
        assert [sock.fileno() >= 0 for sock in public] == [False, True, False]
        assert (worker.ops, sorted(worker.mesh)) == (None, [0, 2])
        assert worker.ops_at.endswith("of 127.0.0.1")
        assert worker.control.getsockname() == str(control) == worker.control_path(1)
        assert os.stat(sockets.folder).st_mode & 0o777 == 0o700
        own = {*worker.public, worker.control, *worker.mesh.values()}
        assert all(sock.fileno() >= 0 for sock in own)
        with socket.create_connection(public[1].getsockname(), 5):
            pass  # it listens from the start
    finally:
        sockets.close()


@pytest.mark.parametrize(
    ("text", "most"), [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 10**6)]
)
def test_cores_are_no_more_than_the_containers_quota(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cores(tmp_path / "cpu.max") == min(most, cores(tmp_path / "missing"))
