"""Modules of scripts/, which are no package."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.support.paths import ROOT


def script(name: str) -> ModuleType:
    """Import scripts/NAME.py, with its neighbours."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
