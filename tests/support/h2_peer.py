"""An HTTP/2 client for tests, by the library ``h2``: what a gateway is to our server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class H2Peer:
    """One connection; ``changed`` waits for the next thing that comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, window: int) -> None:
        self.writer = writer
        self.data: dict[int, bytes] = defaultdict(bytes)
        self.headers: dict[int, list[dict[str, str]]] = defaultdict(list)
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        self.goaway: list[int] = []
        self.closed = False
        self.reads = True
        """Whether what came is taken, so that the other side may send more."""
        self._reader = reader
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.state = h2.connection.H2Connection(config)
        self.state.initiate_connection()
        self.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._news = asyncio.Event()
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.state.data_to_send())

    def open(self, path: str, fields: Iterable[tuple[str, str]] = (), *, end: bool = False) -> int:
        """A new stream."""
        number: int = self.state.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "picker")]
        head += [("content-type", "application/grpc"), ("te", "trailers"), *fields]
        self.state.send_headers(number, head, end_stream=end)
        self.flush()
        return number

    async def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Bytes, as fast as the other side lets them come."""
        while data:
            size = min(
                self.state.local_flow_control_window(number), self.state.max_outbound_frame_size, len(data)
            )
            if not size:
                await self.changed()
                continue
            self.state.send_data(number, data[:size])
            data = data[size:]
            self.flush()
        if end:
            self.state.end_stream(number)
            self.flush()

    async def changed(self) -> None:
        """The next thing that comes."""
        self._news.clear()
        await self._news.wait()

    async def until_over(self, number: int) -> None:
        """The stream has ended, either way."""
        while number not in self.ended and number not in self.reset and not self.closed:
            await self.changed()

    async def run(self) -> None:
        while raw := await self._read():
            try:
                events = self.state.receive_data(raw)
            except h2.exceptions.ProtocolError:
                # The library takes a GOAWAY for the end, and the PING that a draining server sends behind it
                # (RFC 9113, section 6.8) for an error.
                if not self.goaway and b"draining" not in raw:
                    raise
                break
            for event in events:
                self._take(event)
            self.flush()
            self._news.set()
        self.closed = True
        self._news.set()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(65536)
        except ConnectionError:
            return b""

    def _take(self, event: object) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.data[event.stream_id] += event.data
            if self.reads:
                self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            self.headers[event.stream_id].append(dict(event.headers))
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.reset[event.stream_id] = event.error_code
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaway.append(event.error_code)


@asynccontextmanager
async def h2_peer(port: int, *, window: int = 65_535) -> AsyncIterator[H2Peer]:
    """Connected."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = H2Peer(reader, writer, window=window)
    running = asyncio.create_task(peer.run())
    try:
        yield peer
    finally:
        running.cancel()
        writer.close()
