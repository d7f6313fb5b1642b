"""The image of a release (``make release``): as its user, on a read-only root, it serves the demo."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas import __version__

pytestmark = [pytest.mark.real, pytest.mark.process]  # its subject is the image

IN_THE_IMAGE = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
for folder in tmp var/cache/kvatlas; do mount -t tmpfs -o mode=1777 tmpfs "$1/$folder"; done
root=$1
user=$2
shift 2
exec chroot --userspec="$user" "$root" env -i "$@"
"""
"""As a container runtime does with ``--read-only --tmpfs /tmp``, in a mount namespace: ROOT USER WORD..."""


def buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Container, settings and root folder of the image in ``dist/``."""
    folder = os.environ.get("KVATLAS_DIST")
    archive = next(Path(folder).glob("*-image.tar"), None) if folder else None
    if archive is None:
        pytest.skip("make release has built no image")
    container = buildah("from", f"docker-archive:{archive}")
    try:
        settings = json.loads(buildah("inspect", container))["Docker"]["config"]
        yield container, settings, Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def test_it_serves_the_demo_without_rights(image: tuple[str, dict[str, Any], Path]) -> None:
    _, settings, root = image
    assert settings["User"] == "65532:65532"
    assert settings["Labels"]["org.opencontainers.image.version"] == __version__

    def said(*words: str) -> str:
        inside = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", IN_THE_IMAGE, "sh"]
        inside += [str(root), settings["User"], *settings["Env"], *words]
        done = subprocess.run(inside, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("sh", "-c", "id -u; touch /x 2>/dev/null || echo read-only").split() == ["65532", "read-only"]
    assert said(*settings["Entrypoint"], "--version").strip() == __version__
    result = json.loads(said(*settings["Entrypoint"], "demo", "--seconds", "5", "--engines", "2", "--json"))
    assert result["errors"] == 0
    assert 0 < result["predicted_exact"] <= result["requests"]
