"""From the wheel alone, the first hours as their pages have them end with a verified receipt.

On a machine of their own, in an empty folder: nothing of the checkout is there, nor on ``sys.path``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT, built
from tests.support.reader import Block, Reader, blocks, verified
from tests.support.redis_servers import any_program
from tests.support.wheels import build, installed

pytestmark = [pytest.mark.real, pytest.mark.process]  # its subject is what is installed, in processes

PAGE = ROOT / "docs" / "first-hour.md"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the environment where the wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built("*.whl") or build(ROOT, "wheel", folder / "wheel")
    assert f"pip install ./{wheel.name}\n" in PAGE.read_text("utf-8")
    return installed(wheel, folder / "environment")


@pytest.fixture
def reader(python: Path, tmp_path: Path) -> Iterator[Reader]:
    programs = {"valkey-server": f'#!/bin/sh\nexec {any_program()} "$@"\n'}
    with Reader(tmp_path, python, programs) as shell:
        assert shell.run(Block("", "python -c 'import kvatlas; print(kvatlas.__file__)'")).startswith(
            str(python.parents[1])
        )
        yield shell


def test_one_engine_and_two_with_redis(reader: Reader) -> None:
    """The page from the installation on, which ``make release`` did: each command succeeds."""
    page = itertools.dropwhile(lambda block: block.heading == "Install", blocks(PAGE, "sh"))
    receipts = []
    for block in page:
        if "/kvatlas/receipts |" in block.text:
            verified(reader, block)
            receipts.append(block.heading)
        else:
            reader.run(block)
    assert receipts == ["One engine as it is", "Two engines and Redis"]
