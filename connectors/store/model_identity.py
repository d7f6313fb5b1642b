"""What tells one set of model weights from another, cheaply enough for every start of an engine.

Two engines may serve different weights under one name: a local path that means something else on another
host, a fine-tune copied over its base. Weights in a directory are therefore sampled: name, size and a few
kilobytes of every weight file, and of the model's configuration. Weights from a hub are named by the commit
that was resolved.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGURATION = "config.json"
_FILES_MAX = 256
_SAMPLE_BYTES = 4096
_SAMPLES = 4


def weights_digest(model: str) -> str:
    """Hexadecimal digest of the weights at this path; empty where it is no local file or directory.

    Files that cannot be read count by name and size only.
    """
    path = Path(model)
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            found = (
                file for file in path.iterdir() if file.suffix in _WEIGHTS or file.name == _CONFIGURATION
            )
            files = sorted(found)[:_FILES_MAX]
        else:
            return ""
    except OSError:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            parts = [f"{file.name}\0{size}\0".encode()]
            for sample in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                parts.append(opened.read(_SAMPLE_BYTES))
            return b"".join(parts)
    except OSError:
        return f"{file.name}\0unreadable\0".encode()
