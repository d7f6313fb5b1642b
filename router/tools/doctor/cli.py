"""The ``doctor`` subcommand's arguments. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from router.config.flags import TokenizerFlag


def doctor(
    *,
    engine: Annotated[
        list[str] | None,
        Parameter(
            name="--engine",
            help="URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N]; repeat for more. "
            "Without events= the engine is asked for its event endpoints.",
            negative="",
        ),
    ] = None,
    router: Annotated[
        str | None,
        Parameter(
            help="URL of a running router's ops port: its view is compared; without --engine its engines are "
            "checked."
        ),
    ] = None,
    tokenizer: TokenizerFlag = None,
    config: Annotated[Path | None, Parameter(help="TOML configuration file of the router.")] = None,
    seconds: Annotated[float, Parameter(help="Seconds to listen for live events.")] = 3.0,
    timeout: Annotated[float, Parameter(help="Seconds to wait for each answer.")] = 5.0,
    probe: Annotated[
        bool,
        Parameter(
            help="Send two or three small completions to each engine, and compare predicted with real hits.",
            negative="",
        ),
    ] = False,
    json: Annotated[bool, Parameter(help="One JSON object with every finding.", negative="")] = False,
) -> int:
    """Look at engines and a router as kvatlas uses them; status 1 if anything is amiss, with what to do."""
    from router.tools.doctor.command import run_doctor
    from router.tools.doctor.examine import ExamineSettings

    settings = ExamineSettings(seconds=seconds, timeout_s=timeout, probe=probe)
    return run_doctor(
        engines=engine or [],
        router=router,
        tokenizer=tokenizer,
        config=config,
        settings=settings,
        as_json=json,
    )
