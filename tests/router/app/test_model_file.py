"""What a model's own ``config.json`` adds to events that name no kinds, and what it does not override."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from publisher.block_hash import HashScheme
from publisher.simulator.settings import DEMO_TOKENIZER_DIR
from publisher.zmq_publisher import ZmqPublisher
from router.config.schema import ModelConfig
from router.fleet.engines import EngineAddress
from router.prompts.settings import ANY_MODEL
from tests.support.event_writer import Writer
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

SCHEME = HashScheme()
OLD = (Writer(SCHEME, kind=None), Writer(SCHEME, kind=None, group=1))
"""Events as those of vLLM 0.20 and 0.21."""
NEW = (Writer(SCHEME, kind="sliding_window", window=32), Writer(SCHEME, group=1))
TOKENS = list(range(3, 103))


def model_folder(folder: Path) -> Path:
    shutil.copytree(DEMO_TOKENIZER_DIR, folder)
    content = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


async def show(rig: Rig, publisher: ZmqPublisher, writers: tuple[Writer, ...]) -> None:
    publisher.publish([writer.stored(TOKENS) for writer in writers])
    (engine,) = rig.router.fleet
    await until(lambda: engine.layout is not None and len(engine.layout.groups) == len(writers), "groups")


@pytest.mark.parametrize(
    ("writers", "kinds", "windows"),
    [
        (OLD, ["sliding_window", "full_attention"], [64, None]),
        (OLD[:1], ["full_attention"], [None]),
        (NEW, ["sliding_window", "full_attention"], [32, None]),
    ],
    ids=["named by no event", "another number of groups", "named by the events"],
)
def test_kinds_and_windows_of_groups(
    tmp_path: Path, writers: tuple[Writer, ...], kinds: list[str], windows: list[int | None]
) -> None:
    publisher = ZmqPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")

    async def main() -> None:
        publisher.start()
        async with running({"publish_events": False}) as (engine,):
            given = EngineAddress(engine.base_url, None, publisher.endpoint, publisher.replay_endpoint)
            model = ModelConfig(tokenizer=str(model_folder(tmp_path / "model")))
            config = configure(given, models={ANY_MODEL: model})
            with capture_logs() as logs:
                async with routing(config) as rig:
                    await show(rig, publisher, writers)
                    (one,) = rig.router.fleet

                    def seen() -> tuple[list[str], list[int | None]]:
                        groups = () if one.layout is None else one.layout.groups
                        return [g.kind for g in groups], [g.sliding_window for g in groups]

                    following = rig.router.lifecycle
                    await until(lambda: MODEL in following._layouts, "compared")
                    await until(lambda: seen() == (kinds, windows), lambda: f"{seen()}")
            other = [entry for entry in logs if "config_json_tokens" in entry]
            assert len(other) == (writers is NEW)

    try:
        run(main())
    finally:
        publisher.close()
