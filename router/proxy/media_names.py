"""Names that clients give to images, audio and video, which engines would take from a cache by them."""

from __future__ import annotations

import re
from collections.abc import Generator

from kvatlas.router.openai.members import BodyMember, MalformedError, Scan
from kvatlas.router.prompts.chat.messages import MEDIA_KEYS


def _spelled(*names: str) -> re.Pattern[bytes]:
    """A pattern of these JSON texts in any spelling of their letters."""
    letters = [[b"(?:%b|\\\\u00(?i:%02x))" % (re.escape(c.encode()), ord(c)) for c in name] for name in names]
    return re.compile(b'"(?:%b)"' % b"|".join(map(b"".join, letters)))


_UUID, _MM_HASHES = b"uuid", b"mm_hashes"
_MEDIA = frozenset(key.encode() for key in MEDIA_KEYS)
_NAME, _MEDIUM = _spelled("uuid", "mm_hashes"), _spelled("mm_hashes", *sorted(MEDIA_KEYS))
_WINDOW_BYTES, _OVERLAP_BYTES = 1 << 20, 128


def names_media(body: bytes) -> Generator[None, None, bool]:
    """Steps to whether an image, audio or video in a body has a name of the client's: ``uuid`` in a part of
    a message, ``mm_hashes`` in ``features`` of ``/inference/v1/generate``. vLLM takes it for the content
    (multimodal/processing/inputs.py, ``get_mm_hashes``, 0.33): a part with no content, but the name of
    another client's image, shows the model that image. A body that cannot be read has none.
    """
    # Chats without media, whose tools often know uuids, are not gone through.
    for pattern in (_NAME, _MEDIUM):
        for at in range(0, len(body), _WINDOW_BYTES):
            if pattern.search(body, at, at + _WINDOW_BYTES + _OVERLAP_BYTES):
                break
            yield
        else:
            return False
    scan = Scan(body)
    try:
        for members in scan.objects():
            if members is None:
                yield
            elif _names_media(scan, members):
                return True
    except MalformedError:
        pass
    return False


def has_media(body: bytes) -> bool:
    """Whether a body may have an image, audio or video: its tokens are not all that the engine reads."""
    return _MEDIUM.search(body) is not None


def _names_media(scan: Scan, members: list[BodyMember]) -> bool:
    text = scan.text
    told = {one.name: one for one in members if text[one.value : one.end] != b"null"}
    if _UUID not in told or _MM_HASHES in told:
        return _MM_HASHES in told
    kind = told.get(b"type")
    is_text = kind is not None and text[kind.value : kind.value + 1] == b'"'
    # An image may be null: its name stands for it.
    return not _MEDIA.isdisjoint(one.name for one in members) or (
        kind is not None and is_text and scan.decoded(kind) in _MEDIA
    )
