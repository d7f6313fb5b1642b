"""The operators' page: one static file over the JSON of ``/kvatlas/*``; it holds no data of its own."""

from __future__ import annotations

from importlib.resources import files

from fastapi import Response

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page() -> Response:
    """The page, and what browsers may do with it."""
    html = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    return Response(html, headers=_HEADERS, media_type="text/html")
