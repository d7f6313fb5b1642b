"""What gateways and probes may call: the ext_proc method, and the health check (``grpc.health.v1``)."""

from __future__ import annotations

from typing import Final

from router.epp.context import PickerContext
from router.epp.request.conformance import ConformanceExchange
from router.epp.request.exchange import GatewayExchange
from router.epp.wire import grpc
from router.epp.wire.grpc import GrpcError, GrpcReader, message_frame
from router.epp.wire.protobuf import ProtobufError, as_text, fields, number_field
from router.http.h2.connection import Opener
from router.http.h2.hpack import Field, literal
from router.http.h2.stream import Stream, StreamHandler

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PROCESS: Final = f"/{EXTERNAL_PROCESSOR}/Process".encode()
_CHECK: Final = b"/grpc.health.v1.Health/Check"
_LIGHT_PICKER: Final = "inference-extension"
"""The service of the conformance suite's liveness and readiness probes: the light picker serves once it
knows its pool (pkg/lwepp/server/runserver.go)."""
_SERVING, _NOT_SERVING = 1, 2
_MESSAGE_BYTES_MAX: Final = 4096
_NOT_GRPC: Final = literal(b":status", b"415")
_NOT_POST: Final = literal(b":status", b"405")


def opener(context: PickerContext, *, health_only: bool = False) -> Opener:
    """Takes the streams of a port; ``health_only``: of one that answers health checks alone."""

    def open_stream(stream: Stream, head: list[Field]) -> StreamHandler | None:
        told = dict(head)
        if told.get(b":method") != b"POST":
            stream.send_headers(_NOT_POST, end=True)
        elif not told.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.send_headers(_NOT_GRPC, end=True)
        elif told.get(b":path") == _PROCESS and not health_only:
            kind = ConformanceExchange if context.settings.conformance_headers else GatewayExchange
            return kind(stream, context)
        elif told.get(b":path") == _CHECK:
            return HealthCall(stream, context)
        else:
            stream.send_headers(grpc.only_trailers(grpc.UNIMPLEMENTED, "no such method here"), end=True)
        return None

    return open_stream


class HealthCall:
    """One health check."""

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(_MESSAGE_BYTES_MAX)

    def on_data(self, data: bytes) -> None:
        """See ``StreamHandler``."""
        self._stream.taken(len(data))
        if self._stream.begun:
            return
        try:
            for message in self._reader.feed(data):
                self._answer(message)
                return
        except (GrpcError, ProtobufError) as error:
            self._stream.send_headers(grpc.only_trailers(grpc.INVALID_ARGUMENT, str(error)), end=True)

    def on_end(self) -> None:
        """See ``StreamHandler``."""
        if not self._stream.begun:
            text = "a check is one message"
            self._stream.send_headers(grpc.only_trailers(grpc.INVALID_ARGUMENT, text), end=True)

    def on_lost(self) -> None:
        """See ``StreamHandler``."""

    def _answer(self, message: bytes) -> None:
        service = ""
        for number, value in fields(message):
            if number == 1:
                service = as_text(value)
        if service in ("", "liveness"):
            serves = True
        elif service in ("readiness", EXTERNAL_PROCESSOR):
            serves = not self._context.draining and self._context.readiness()
        elif service == _LIGHT_PICKER:
            serves = self._context.synced()
        else:
            self._stream.send_headers(grpc.only_trailers(grpc.NOT_FOUND, "unknown service"), end=True)
            return
        self._stream.send_headers(grpc.HEAD)
        self._stream.send(message_frame(number_field(1, _SERVING if serves else _NOT_SERVING)))
        self._stream.finish(grpc.trailers(grpc.OK))
