"""The set-up of a release: its files, a fleet that they describe, and what a replica leaves in Redis.

    python -m tests.upgrade.setup      # writes what this version leaves behind into the folder of its version

To be run once, as a release is made; from then on the folder is history and is not written again. By hand are
``kvatlas.toml`` and ``values.yaml``. Written: ``keys.toml``; ``redis.json``, every key of the index with its
value while a replica serves; ``messages.json``, one message of each kind between routers; ``usage.jsonl``;
``names.json``, what may be removed only after an announcement.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvatlas import __version__
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.admission.key_file import digest_of
from kvatlas.router.admission.others_use import Use, Uses
from kvatlas.router.config.load import SECTIONS, load, plain_keys
from kvatlas.router.config.schema import Config
from kvatlas.router.observe.usage import UsageLine
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.gossip import GossipEntry, InflightEvent
from kvatlas.router.replication.limits import UseMessage
from kvatlas.router.replication.load_gossip import ReplicaLoad
from kvatlas.router.workers.gossip import WorkerMessage
from tests.docs.pages import table_rows
from tests.support.clients import openai_client
from tests.support.paths import ROOT
from tests.support.redis_servers import VirtualServer
from tests.support.waiting import run, until, until_thread
from tests.support.whole_router import MODEL, TEXT, Rig, routing, running

HERE = Path(__file__).parent
PORTS = 8101, 8102
KEY = "key-of-acme"
FIRST = f"http://127.0.0.1:{PORTS[0]}"
MESSAGES: dict[str, Any] = {
    "GossipEntry": GossipEntry("old", 5, 7, InflightEvent.SENT, FIRST, (3, (4, 9, 2)), bytes(range(16))),
    "ReplicaLoad": ReplicaLoad(3, {FIRST: OthersLoad(1, 2, 30, 40, 50)}),
    "UseMessage": UseMessage("group", Uses(1, 2, True, {"acme": Use()})),
    "WorkerMessage": WorkerMessage(1, 1.5, [b"x"], b"y", [(bytes(8), FIRST)], Uses(1, 2, True, {})),
}
"""One of each kind, with every field that 0.1.0 had."""


def configuration(kept: Path, folder: Path, index_url: str, replica: str) -> Config:
    """The kept configuration with this machine's paths, an index and free ports."""
    shown = (kept / "kvatlas.toml").read_text("utf-8")
    for name, value in (("TOKENIZER", DEMO_TOKENIZER_DIR), ("INDEX", index_url), ("FOLDER", folder)):
        shown = shown.replace(f'"{name}', f'"{value}')
    file = folder / f"{replica}.toml"
    file.write_text(shown.replace('replica = "old"', f'replica = "{replica}"'))
    config = load(file, environ={}).config
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=0, ops_port=0))


@asynccontextmanager
async def engines() -> AsyncIterator[list[SimulatedEngine]]:
    """The two engines of the configuration."""
    async with running(*({"port": port} for port in PORTS)) as started:
        yield started


def text(number: int) -> str:
    """One conversation's prompt, always the same for a number."""
    return f"Conversation {number}. {TEXT * 20}"


async def chat(rig: Rig, number: int) -> None:
    """Send it to a router; its receipt is the newest afterwards."""
    await rig.chat(text(number), extra_headers={"authorization": f"Bearer {KEY}"})
    await until(lambda: rig.idle, "the request is over")


async def prompt(engine_url: str, number: int) -> None:
    """Send it to an engine."""
    async with openai_client(engine_url) as api:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        await api.chat.completions.create(messages=[{"role": "user", "content": text(number)}], **body)


def dump(server: VirtualServer) -> dict[str, Any]:
    """Every key of the index, in hex: strings, the fields of hashes, the number of entries of streams."""
    found: dict[str, Any] = {}
    for key in sorted(server.all_keys()):
        kind = server.command("TYPE", key)
        if kind in {"string", b"string"}:
            found[key.hex()] = server.command("GET", key).hex()
        elif kind in {"hash", b"hash"}:
            flat = server.command("HGETALL", key)
            pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
            found[key.hex()] = {name.hex(): value.hex() for name, value in pairs}
        else:
            found[key.hex()] = int(server.command("XLEN", key))
    return found


def restore(server: VirtualServer, kept: dict[str, Any], identity: str) -> None:
    """Strings and hashes as they were, on a server of this ``identity``; streams are of seconds ago only."""
    for key, value in kept.items():
        if isinstance(value, str):
            server.command("SET", bytes.fromhex(key), bytes.fromhex(value))
        elif isinstance(value, dict):
            for name, content in value.items():
                server.command("HSET", bytes.fromhex(key), bytes.fromhex(name), bytes.fromhex(content))
            if b"home".hex() in value:
                server.command("HSET", bytes.fromhex(key), b"home", identity)


async def left_behind(server: VirtualServer, kept: Path, folder: Path) -> dict[str, Any]:
    """Serve three conversations by this version, twice each; what is in the index then."""
    async with engines() as fleet, routing(configuration(kept, folder, server.url, "old")) as rig:
        for number in (0, 1, 2, 0, 1, 2):
            await chat(rig, number)
            await rig.caught_up(*fleet)
        await asyncio.sleep(2)
        await until_thread(lambda: rig.router.usage.stats.written >= 6, "the record is written")
        return dump(server)


def names() -> dict[str, list[str]]:
    """List what docs/versions.md promises by name, as the reference pages and the code list it."""
    pages = {page: (ROOT / page).read_text("utf-8") for page in ("docs/cli.md", "docs/metrics.md")}
    values = [row[0].strip("`") for row in table_rows(ROOT / "charts" / "kvatlas" / "README.md", "value")]
    return {
        "settings": sorted(f"{section}.{key}" for section in SECTIONS for key in plain_keys(section)),
        "flags": sorted(set(re.findall(r"`(--[a-z-]+)`", pages["docs/cli.md"]))),
        "metrics": sorted(set(re.findall(r"\bkvatlas_[a-z_]+", pages["docs/metrics.md"]))),
        "usage": list(UsageLine.__struct_fields__),
        "values": sorted(values),
    }


def main() -> None:
    """Write the folder of this version."""
    kept = HERE / __version__
    (kept / "keys.toml").write_text(
        f"[tenants.acme]\nrequests_per_minute = 600\nconcurrent_requests = 8\n\n"
        f'[[keys]]\ntenant = "acme"\nname = "first"\nsha256 = "{digest_of(KEY)}"\n'
    )
    server = VirtualServer()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys.toml").write_bytes((kept / "keys.toml").read_bytes())
        content = run(left_behind(server, kept, Path(folder)))
        (kept / "usage.jsonl").write_bytes((Path(folder) / "usage.jsonl").read_bytes())
    messages = {name: msgspec.msgpack.encode(message).hex() for name, message in MESSAGES.items()}
    for name, value in (("redis.json", content), ("messages.json", messages), ("names.json", names())):
        (kept / name).write_text(json.dumps(value, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.world import seams

    seams.install()
    main()
