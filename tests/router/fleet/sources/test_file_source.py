"""Engines from a file that is written while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.fleet.engines import DiscoveredEngine, EngineAddress
from kvatlas.router.fleet.file_source import FileSource
from kvatlas.router.fleet.settings import FileSettings
from kvatlas.router.fleet.sources import BadListError, read_list
from tests.support.seen_sources import Seeing, at_work

ONE = '[[engines]]\nbase_url = "http://a:1"\n'
TWO = ONE + '[[engines]]\nbase_url = "http://b:2/"\nevents = "tcp://b:5557"\ndrain = true\n'


def seeing(path: Path) -> AbstractAsyncContextManager[Seeing]:
    return at_work(Seeing(FileSource(FileSettings(path=str(path), interval_s=0.01))))


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(ONE)
    async with seeing(path) as seen:
        await seen.sees({"http://a:1": ""})
        assert seen.source.stats.synced
        replace(path, TWO)
        await seen.sees({"http://a:1": "", "http://b:2": "drained in the file"})
        path.write_text(ONE)  # in place works too
        await seen.sees({"http://a:1": ""})
        replace(path, "engines = []")
        await seen.sees({})
        assert not seen.source.stats.failing


async def test_it_is_read_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def read(_: FileSource) -> bytes:
        nonlocal reads
        reads += 1
        return b""

    monkeypatch.setattr(FileSource, "_read", read)
    async with seeing(tmp_path):
        await asyncio.sleep(1.0)
    assert 50 < reads <= 101


async def test_a_change_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(ONE)
    stamp = path.stat()
    async with seeing(path) as seen:
        await seen.sees({"http://a:1": ""})
        path.write_text(ONE.replace("a:1", "c:1"))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        await seen.sees({"http://c:1": ""})


async def test_a_mounted_config_map_is_swapped_by_its_directory(tmp_path: Path) -> None:
    for version, text in (("v1", ONE), ("v2", TWO)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "engines.toml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    path = tmp_path / "engines.toml"
    path.symlink_to("..data/engines.toml")
    async with seeing(path) as seen:
        await seen.sees({"http://a:1": ""})
        (tmp_path / "..tmp").symlink_to("v2")
        (tmp_path / "..tmp").replace(tmp_path / "..data")
        await seen.sees({"http://a:1": "", "http://b:2": "drained in the file"})


def test_a_list_that_is_just_being_written_is_not_believed() -> None:
    """Half a file may make sense, with half of the engines."""
    seen = Seeing(FileSource(FileSettings(path="engines.toml")))
    for reading in (TWO, TWO, ONE, TWO, ONE, ONE + "\n", TWO):
        seen.source._apply(reading.encode(), seen.tell)
    assert [len(told) for told in seen.told] == [2]
    seen.source._apply(ONE.encode(), seen.tell)
    seen.source._apply(ONE.encode(), seen.tell)
    assert [len(told) for told in seen.told] == [2, 1]


@pytest.mark.parametrize(
    ("content", "reason", "told"),
    [
        ("[[engines]", "malformed", "not a list of engines: Expected"),
        ("", "malformed", "engines must be given"),
        ("engine = []", "malformed", "unknown key engine; did you mean engines? known: engines"),
        ("engines = 3", "malformed", "engines = 3: expected a list of tables"),
        ("engines = [3]", "malformed", "engines[0] = 3: expected a table"),
        ('[[engines]]\nevents = "tcp://a:2"', "malformed", "engines[0]: base_url must be given"),
        ('[[engines]]\nbase_url = "ftp://x"', "malformed", "expected http://HOST:PORT"),
        (ONE + ONE, "malformed", "http://a:1 is listed twice"),
        (
            f'{ONE}[[engines]]\nbase_url = "http://b:1"\nreplya = "x"',
            "malformed",
            "unknown key engines[1].replya; did you mean engines[1].replay? known: base_url, dp_rank, drain,",
        ),
        (
            '[[engines]]\nbase_url = "http://a:1"\nrole = "prefil"',
            "malformed",
            "engines[0].role = 'prefil': expected one of prefill, decode, both; did you mean prefill?",
        ),
        (
            '[[engines]]\nbase_url = "http://a:1"\ndrain = "yes"',
            "malformed",
            "engines[0].drain = 'yes': expected true or false",
        ),
        ("# " + "x" * 20_000, "unreadable", "larger than 10000 bytes"),
        (None, "unreadable", "no such file"),
    ],
)
async def test_a_file_without_a_list_changes_nothing_and_is_reported(
    tmp_path: Path, content: str | None, reason: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.fleet.file_source.FILE_BYTES_MAX", 10_000)

    path = tmp_path / "engines.toml"
    path.write_text(ONE)
    async with seeing(path) as seen:
        await seen.sees({"http://a:1": ""})
        if content is None:
            path.unlink()
        else:
            replace(path, content)
        await seen.until(lambda: seen.source.stats.failing, "the failure")
        assert told in seen.source.stats.last_error
        assert str(path) in seen.source.stats.last_error
        assert seen.source.stats.errors[reason] >= 1
        assert len(seen.told) == 1
        replace(path, TWO)
        await seen.until(lambda: not seen.source.stats.failing, "recovered")
        assert len(seen.told) == 2


async def test_the_old_content_again_ends_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(ONE)
    async with seeing(path) as seen:
        await seen.sees({"http://a:1": ""})
        path.unlink()
        await seen.until(lambda: seen.source.stats.failing, "the failure")
        path.write_text(ONE)
        await seen.until(lambda: not seen.source.stats.failing, "recovered")
        assert len(seen.told) == 1


async def test_a_file_that_comes_later_is_read_then(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with seeing(path) as seen:
        await seen.until(lambda: seen.source.stats.failing, "the failure")
        assert not seen.source.stats.synced
        path.write_text('{"engines": [{"base_url": "http://j:1", "dp_rank": 0, "topic": "t"}]}')
        await seen.sees({"http://j:1": ""})


def test_json_and_toml_say_the_same() -> None:
    as_json = b'{"engines": [{"base_url": "http://a:1", "events": "tcp://a:2", "drain": false}]}'
    as_toml = b'[[engines]]\nbase_url = "http://a:1"\nevents = "tcp://a:2"\n'
    wanted = [DiscoveredEngine(EngineAddress("http://a:1", None, "tcp://a:2"))]
    assert read_list(as_json, is_json=True) == read_list(as_toml, is_json=False) == wanted


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_a_list_or_refused(content: bytes, is_json: bool) -> None:
    with contextlib.suppress(BadListError):
        read_list(content, is_json=is_json)
