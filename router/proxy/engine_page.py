"""Pages of an engine, or of the bootstrap server beside it, over the proxy's own connections."""

from __future__ import annotations

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.http.upstream_pool import UpstreamClient
from kvatlas.router.proxy.headers import request_head

_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20


class EnginePage:
    """Implements ``kvatlas.router.pd.transfer.Query``."""

    def __init__(self, client: UpstreamClient, path: bytes) -> None:
        self._client = client
        self._path = path

    async def __call__(self, base_url: str) -> bytes:
        """Implement ``Query``."""
        origin = self._client.origin(base_url)
        head = request_head(
            "GET", origin.path_prefix + self._path, origin.host_header, [], own=(), length=None
        )
        try:
            answer = await self._client.request(origin, "GET", head, b"", _TIMEOUT_S)
        except UpstreamError as error:
            raise OSError(f"{base_url}: {error.reason}") from None
        try:
            content = b""
            while data := await answer.read():
                content += data
                if len(content) > _ANSWER_BYTES_MAX:
                    raise OSError(f"{base_url}: more than {_ANSWER_BYTES_MAX} bytes")
        except UpstreamError as error:
            raise OSError(f"{base_url}: {error.reason}") from None
        finally:
            self._client.release(answer)
        if answer.status != 200:
            raise OSError(f"{base_url}: status {answer.status}")
        return content
