"""One version: scripts/check_version.py, which a release runs, reads what the package says."""

from __future__ import annotations

import kvatlas
from tests.support.scripts import script


def test_every_place_names_the_version_of_the_package() -> None:
    assert set(script("check_version").versions().values()) == {kvatlas.__version__}
