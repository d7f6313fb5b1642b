"""Least rights and secrets: the documented ACL is enough, and no password shows anywhere."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router.config.load import load
from tests.support.paths import ROOT
from tests.support.process_fleet import fleet
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import run

DOCS = ROOT / "docs" / "redis.md"
SECRET = "correct-horse"
USER, TOOL = f"kvatlas:{SECRET}", f"tool:{SECRET}"


def documented_acl() -> list[str]:
    """The ``ACL SETUSER`` command of the documentation, as words."""
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(r"^(ACL SETUSER kvatlas (?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE)
    assert found is not None
    return found[1].replace("\\\n", " ").replace(">PASSWORD", f">{SECRET}").split()


@pytest.mark.process
def test_a_fleet_works_with_the_documented_rights_only() -> None:
    async def main(server: Server) -> None:
        url, tools = (server.url.replace("redis://", f"redis://{who}@") for who in (USER, TOOL))
        async with fleet(url, tools=tools, engines=2) as made:
            await made.clients.more(20)
            await made.check_exact()
            for member in made.members:
                assert await made.metric(member, "kvatlas_mirror_errors_total") == 0
                assert (
                    await made.metric(member, "kvatlas_shared_index_fallbacks_total") <= 2
                )  # before it connected
            logged = msgspec.json.encode([member.lines for member in made.members]).decode()
            assert SECRET not in logged
            assert "NOPERM" not in logged

    with Server(any_program()) as server:
        server.command(*documented_acl())
        server.command("ACL", "SETUSER", "tool", "on", f">{SECRET}", "~*", "&*", "+@all")
        server.command("ACL", "SETUSER", "default", "resetpass", ">other")
        run(main(server))


def test_a_password_among_the_flags_is_refused_with_the_remedy(
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    url = f"redis://kvatlas:{SECRET}@127.0.0.1:1/0"
    engine = ("--engine", "http://127.0.0.1:1")
    for flags in (("--index", url), ("--set", f"index.url={url}")):
        refused = kvatlas("serve", *engine, *flags)
        assert refused.returncode == 2
        assert "--index-file" in refused.stderr
        assert "KVATLAS_INDEX_URL" in refused.stderr
        assert SECRET not in refused.stderr + refused.stdout


def test_a_password_from_environment_or_file_is_taken_and_never_printed(
    tmp_path: Path, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    url = f"redis://kvatlas:{SECRET}@127.0.0.1:1/0"
    path = tmp_path / "url"
    path.write_text(url + "\n")
    assert load(index_file=path, environ={}).config.index.url == url
    from_file = kvatlas("serve", "--print-config", "--index-file", str(path))
    from_environment = kvatlas("serve", "--print-config", KVATLAS_INDEX_URL=url)
    for printed in (from_file, from_environment, kvatlas("index", "stats", KVATLAS_INDEX_URL=url)):
        assert SECRET not in printed.stderr + printed.stdout
    for shown in (from_file, from_environment):
        assert 'index.url = "redis://kvatlas:***@127.0.0.1:1/0"' in shown.stdout
