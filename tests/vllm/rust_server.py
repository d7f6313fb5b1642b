"""``vllm serve`` of an environment without vLLM's package metadata, which its command needs.

``-m tests.vllm.rust_server serve MODEL ...`` under the Python of vLLM 0.33 over 0.32's compiled modules.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    options = parser.parse_args()
    command.validate(options)
    command.cmd(options)


if __name__ == "__main__":
    main()
