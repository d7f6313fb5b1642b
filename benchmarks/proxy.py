"""Proxy CPU per request and per streamed chunk, beside other routers in the same run.

    python benchmarks/proxy.py BENCH_PY [--peers sgl_cache,vr_cache] [--only ns1k,ns32k] [--secs 4]
        [--workers 1,2,4] [-o FILE]

``BENCH_PY`` is a load runner that starts fake engines on ports 9001-9004, drives each router in turn and
measures the CPU time of its process tree (the arguments ``--own NAME=COMMAND``, ``--only``, ``--secs`` and
``-o`` are passed on). Prefix routing, tokenizing and event feeds are on and the index is warm: matching
events are published beside the fake engines. Peers need ``PEERS_BIN``, the bin folder of an environment with
sglang-router and vllm-router.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "publisher" / "assets" / "demo_tokenizer"
ENGINE_PORTS = (9001, 9002, 9003, 9004)
EVENT_PORTS = (19001, 19011, 19021, 19031)


def router_command(workers: int) -> str:
    """How the runner starts kvatlas; ``{port}`` is the runner's to fill in."""
    host = "127.0.0.1"
    engines = " ".join(
        f"--engine http://{host}:{port},events=tcp://{host}:{events},replay=tcp://{host}:{events + 1}"
        for port, events in zip(ENGINE_PORTS, EVENT_PORTS, strict=True)
    )
    python, tokenizer = shlex.quote(sys.executable), shlex.quote(str(TOKENIZER))
    rest = f"--port {{port}} --ops-port off --log-level warning --workers {workers}"
    return f"{python} -m router serve {engines} --tokenizer {tokenizer} {rest}"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("bench", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--only", default="ns1k,ns32k,paced,p256,lat")
    parser.add_argument("--secs", default="4")
    parser.add_argument("--workers", default="1", help="numbers of workers, each a router of the run")
    parser.add_argument("-o", default=os.devnull)
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    events = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fake_engine_events", str(TOKENIZER), *map(str, EVENT_PORTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    if events.stdout is None or events.stdin is None or not events.stdout.readline():
        print("the event publisher did not start", file=sys.stderr)
        return 1
    try:
        own = {f"kvatlas{n if n > 1 else ''}": router_command(n) for n in map(int, args.workers.split(","))}
        options = ["--only", args.only, "--secs", args.secs]
        options += [word for name, command in own.items() for word in ("--own", f"{name}={command}")]
        routers = [*filter(None, args.peers.split(",")), *own]
        command = [sys.executable, str(args.bench), *options, "-o", args.o, *routers]
        return subprocess.call(command, env=environment, cwd=ROOT)
    finally:
        events.stdin.close()
        events.wait(10)
        events.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
