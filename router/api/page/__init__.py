"""The status page: one static file over the JSON of ``/kvatlas/*``; it holds no data of its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import Response


@cache
def page() -> Response:
    """Return the page and its headers, which restrict what it may do in a browser."""
    html = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


def _policy(html: str) -> str:
    """Allow only the page's own style and script, by their hashes (CSP 3, 6.7.3.3); texts cannot become
    markup (``require-trusted-types-for``)."""
    return (
        f"default-src 'none'; style-src {_hash_of('style', html)}; script-src {_hash_of('script', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_of(tag: str, html: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    if found is None:
        raise ValueError(f"index.html has no <{tag}>")
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
