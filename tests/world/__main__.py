"""``python -m tests.world``, which runs ``command``."""

import os
import sys

if os.environ.get("PYTHONHASHSEED") is None:  # sets are in the order of hashes
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.world", *sys.argv[1:]],
        {**os.environ, "PYTHONHASHSEED": "0"},
    )

from tests.world import seams

seams.install()  # before anything of the product is imported

import logging  # noqa: E402

import structlog  # noqa: E402

from tests.world.command import main  # noqa: E402

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
logging.disable(logging.CRITICAL)  # a router's lines would hide the violations

sys.exit(main())
