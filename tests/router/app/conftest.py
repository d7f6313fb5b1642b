from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def anthropic() -> ModuleType:
    """The client library, imported by the tests that use it: that takes a second, in every worker."""
    import anthropic as library  # noqa: PLC0415

    return library
