"""The ``kvatlas`` command. Each subcommand's arguments are in the ``cli`` module of its room, which
imports what it needs when it runs, so that --help is quick.

Every subcommand checks its input before it starts anything: bad arguments and bad configuration end with
status 2 and a message that names the argument or key. Other statuses: 0 done, 1 the answer is no (a probe
not exact, a check failed).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from router import __version__
from router.config.errors import ConfigError
from router.demo.cli import demo
from router.serve.cli import epp, serve
from router.sidecar.cli import sidecar
from router.simulate.advise.cli import advise
from router.simulate.cli import simulate
from router.tools import cli as tools
from router.tools.doctor.cli import certify, doctor
from router.tools.index.cli import index_app
from router.tools.top.cli import top

app = App(
    name="kvatlas",
    version=__version__,
    help="Routes LLM requests to the vLLM engine that has to compute the least, by what its KV cache holds.",
)
app.register_install_completion_command(
    help="Install tab completion for this shell (bash, zsh, fish); --shell names another one."
)
for each in (
    serve,
    epp,
    sidecar,
    tools.verify,
    index_app,
    tools.keys_app,
    tools.invoice,
    tools.engine,
    demo,
    tools.record,
    tools.replay,
    tools.explain,
    doctor,
    certify,
    advise,
    simulate,
    top,
):
    app.command(each)


def call(words: Sequence[str]) -> int:
    """Run one command; 2 where its arguments or its configuration cannot be used. Raises everything else."""
    try:
        status = app(list(words), result_action="return_value", exit_on_error=False)
    except CycloptsError:  # printed already, with a box around it
        return 2
    except ConfigError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
