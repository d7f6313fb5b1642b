"""The access log of a whole router: lines of real requests, and a router that does not care if it fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.observe.access_log import AccessLogSettings
from router.simulate.fetch import fetch_access_log
from router.simulate.workload.access_log import read_capture
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, configure, routing, running


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_are_written_with_what_was_predicted_and_what_came(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    story = TEXT * 60

    async def main() -> None:
        async with running({}) as engines:
            config = configure(*engines, access_log=AccessLogSettings(path=str(path)))
            async with routing(config) as rig:
                await rig.chat(story)
                await rig.caught_up(*engines)
                stream = await rig.api.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": story}],
                    max_tokens=3,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for _ in stream:
                    pass
                await until(lambda: rig.idle, "all requests over")
                _, page = await rig.ask("GET", "/metrics")
                assert 'kvatlas_access_log_dropped_total{reason="queue_full"} 0.0' in page
                log = rig.router.accounts.access
                assert log is not None
                await until(lambda: log.stats.written == 2, "lines written")

    run(main())
    first, second = lines_of(path)
    assert first["hash_ids"] == second["hash_ids"]
    assert first["input_length"] == second["input_length"]
    assert len(first["hash_ids"]) == -(-first["input_length"] // 512)
    assert (first["stream"], second["stream"]) == (False, True)
    assert first["ttft_s"] is None
    assert 0 < second["ttft_s"] <= second["duration_s"]
    assert first["cached_tokens"] == first["predicted_tokens"] == 0
    assert second["cached_tokens"] == second["predicted_tokens"] > 0
    assert (first["output_length"], second["output_length"]) == (3, 3)
    assert story[:40] not in path.read_text()
    capture = read_capture(path)
    assert [one.asked.input_tokens for one in capture] == [first["input_length"]] * 2
    assert capture[1].cached_tokens == second["cached_tokens"]


def test_the_log_can_be_had_from_the_router(tmp_path: Path) -> None:
    path, copy = tmp_path / "access.jsonl", tmp_path / "copy.jsonl"
    (tmp_path / "access.jsonl.1").write_text('{"older": true}\n')

    async def main() -> None:
        async with running({}) as engines:
            config = configure(*engines, access_log=AccessLogSettings(path=str(path)))
            async with routing(config) as rig:
                await rig.chat(TEXT)
                log = rig.router.accounts.access
                assert log is not None
                await until(lambda: log.stats.written == 1, "a line written")
                await asyncio.to_thread(fetch_access_log, rig.ops_url, copy)

    run(main())
    assert copy.read_text() == '{"older": true}\n' + path.read_text()


def test_a_router_without_a_log_says_what_to_set(tmp_path: Path) -> None:
    async def main() -> None:
        async with running({}) as engines, routing(configure(*engines)) as rig:
            status, page = await rig.ask("GET", "/kvatlas/access_log")
            assert status == 404
            assert page["error"]["code"] == "access_log_off"
            with pytest.raises(OSError, match=r"set access_log\.path"):
                await asyncio.to_thread(fetch_access_log, rig.ops_url, tmp_path / "copy.jsonl")

    run(main())


def test_a_log_that_cannot_be_written_fails_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()

    async def main() -> None:
        async with running({}) as engines:
            config = configure(*engines, access_log=AccessLogSettings(path=str(folder / "a.jsonl")))
            folder.rmdir()
            async with routing(config) as rig:
                await rig.chat(TEXT)
                log = rig.router.accounts.access
                assert log is not None
                await until(lambda: log.stats.dropped["not_writable"] == 1, "the disk refused")
                await rig.chat(TEXT)
                rig.check_books()

    run(main())


def test_no_log_unless_asked_for() -> None:
    async def main() -> None:
        async with running({}) as engines, routing(configure(*engines)) as rig:
            await rig.chat(TEXT)
            assert rig.router.accounts.access is None
            _, page = await rig.ask("GET", "/metrics")
            assert "kvatlas_access_log" not in page

    run(main())
