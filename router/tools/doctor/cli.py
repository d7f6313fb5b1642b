"""Command-line arguments of ``doctor`` and ``certify``.

Light to import: the implementation is imported when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from router.config.load import TokenizerFlag


def doctor(
    *,
    engine: Annotated[
        list[str] | None,
        Parameter(
            name="--engine",
            help="URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N]; repeat for more. "
            "Without events= the event endpoints are read from the engine.",
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
    """Examine engines and a router as kvatlas uses them; exits with 1 if it finds a problem, and says how to
    fix it.
    """
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


def certify(
    *,
    engine: Annotated[
        str,
        Parameter(
            help="URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N]; without a rank, all ranks.",
        ),
    ],
    tokenizer: TokenizerFlag = None,
    config: Annotated[
        Path | None, Parameter(help="TOML configuration with the model facts that events do not carry.")
    ] = None,
    model: Annotated[str, Parameter(help="Model name that the engine must serve; default: any.")] = "",
    seconds: Annotated[float, Parameter(help="Seconds after which the load starts no more requests.")] = 40.0,
    timeout: Annotated[
        float, Parameter(help="Seconds to wait for each response that needs no prefill.")
    ] = 5.0,
    json: Annotated[
        bool, Parameter(help="One JSON object with every property and its evidence.", negative="")
    ] = False,
) -> int:
    """Certify one engine under a small load: status 0 certified, 1 not certified, 2 could not run."""
    from router.tools.doctor.command import run_certify
    from router.tools.doctor.examine import ExamineSettings
    from router.tools.doctor.gather.load import LoadPlan

    settings = ExamineSettings(
        seconds=0.5,
        timeout_s=timeout,
        probe_timeout_s=20.0,
        probe=True,
        model=model,
        load=LoadPlan(seconds_max=seconds),
    )
    return run_certify(engine=engine, tokenizer=tokenizer, config=config, settings=settings, as_json=json)
