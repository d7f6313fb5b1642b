"""Everything that pages name exists: link targets, commands and flags, make targets, settings, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

from kvatlas.router.cli import app
from kvatlas.router.config.load import SECTIONS
from kvatlas.router.config.removed import REMOVED
from kvatlas.router.config.schema import Config
from tests.docs.pages import (
    anchors,
    command_lines,
    connector_metrics,
    files,
    inline_code,
    links,
    pages,
    programs,
)
from tests.support.paths import ROOT

MACHINE_WORDS = re.compile(r"/wor[k]/|/tmp/env[s]|pythonhoste[d]|pypi\.or[g]")
"""Paths of the machine this was written on, and hosts that an installation may not need."""
_DEFAULT = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)`(?: \(| )([\d.,]*\d)(?: (s|MiB|%))?")


@cache
def flags_of(*path: str) -> set[str]:
    """The flags of a command, which many pages name."""
    command = app
    for word in path:
        command = command[word]
    return {name for argument in command.assemble_argument_collection() for name in argument.names} - {"*"}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_id(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page_id(page)}: {link}"


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_commands_and_flags_exist(page: Path) -> None:
    for words in command_lines(page, "kvatlas"):
        if words[0] in {"--version", "--help"}:
            continue
        command, path = app[words[0]], [words[0]]
        if words[1:] and not words[1].startswith("-") and words[1] in list(command):
            command = command[words[1]]
            path.append(words[1])
        if command.default_command is None:  # a group of commands, named as such
            continue
        known = flags_of(*path)
        flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        assert flags <= known | {"--help"}, f"{page_id(page)}: kvatlas {' '.join(words)}"


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in command_lines(page, "make"):
        assert re.search(rf"^{re.escape(words[0])}:", makefile, re.MULTILINE), f"make {words[0]}"


@pytest.mark.parametrize("page", [p for p in pages() if "decisions" not in p.parts], ids=page_id)
def test_programs_of_the_checkout_and_their_flags_exist(page: Path) -> None:
    for program, flags in programs(page):
        found = ROOT / program
        sources = [found] if found.is_file() else [*found.glob("*.py")]
        assert sources, f"{page_id(page)}: {program}"
        text = "".join(source.read_text(encoding="utf-8") for source in sources)
        for flag in flags:
            known = flag in text or flag.removeprefix("--").replace("-", "_") in text
            assert known, f"{page_id(page)}: {program} {flag}"


@pytest.mark.parametrize("page", [p for p in pages() if "charts" not in p.parts], ids=page_id)
def test_settings_exist(page: Path) -> None:
    pattern = re.compile(rf"({'|'.join(SECTIONS)})\.([a-z_]+)(\*?)")
    for text in inline_code(page):
        named = pattern.fullmatch(text)
        if named is None:
            continue
        section, key, wildcard = named.groups()
        known = SECTIONS[section].__struct_fields__
        found = any(name.startswith(key) for name in known) if wildcard else key in known
        assert found or text in REMOVED or key in {"md", "py"}, f"{page_id(page)}: {text}"


def defaults_told(page: Path) -> Iterator[tuple[str, float]]:
    """Settings whose default stands behind their name, as in `listen.drain_s_max` (30 s)."""
    for key, number, unit in _DEFAULT.findall(page.read_text(encoding="utf-8")):
        yield key, float(number.replace(",", "")) * {"MiB": 1 << 20, "%": 0.01}.get(unit, 1)


def test_defaults_told_in_pages_are_those_of_the_code() -> None:
    told = [
        (page_id(page), *one)
        for page in pages()
        if page.parent == ROOT / "docs"
        for one in defaults_told(page)
    ]
    assert len(told) > 12
    real = {key: attrgetter(key)(Config()) for _, key, _ in told}
    assert [one for one in told if real[one[1]] != one[2]] == []


@pytest.mark.parametrize("page", [p for p in pages() if p.name != "metrics.md"], ids=page_id)
def test_metrics_exist(page: Path) -> None:
    listed = {*inline_code(ROOT / "docs" / "metrics.md"), *connector_metrics()}
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\bkvatlas_[a-z_]+", text)):
        assert name in listed, f"{page_id(page)}: {name}"


@pytest.mark.parametrize("page", [p for p in pages() if "decisions" not in p.parts], ids=page_id)
def test_files_exist(page: Path) -> None:
    pattern = re.compile(r"(router|publisher|connectors|tests|scripts|charts)/[\w./-]+")
    for text in inline_code(page):
        if pattern.fullmatch(text):
            assert (ROOT / text).exists(), f"{page_id(page)}: {text}"


def test_programs_are_found_in_pages() -> None:
    named = [*programs(ROOT / "README.md")]
    assert ("benchmarks/legs.py", ["--rounds"]) in named
    assert ("benchmarks/routing.py", []) in named


def test_the_readme_starts_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "```sh\nmake demo\nmake test\n```" in text


def test_nothing_names_the_machine_it_was_written_on() -> None:
    named = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        named += [f"{page_id(path)}: {word}" for word in MACHINE_WORDS.findall(text)]
    assert not named


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    """kvatlas is on no package index: it is installed from a checkout, or a wheel built from one."""
    by_name = re.compile(r"pip install [^\n`]*kvatlas(\[|['\"]|\s|$)")
    told = [*pages(), *(ROOT / "router").rglob("*.py"), *(ROOT / "connectors").rglob("*.py")]
    told += [path for path in (ROOT / "examples").rglob("*") if path.is_file()]
    lines = [(page_id(path), line) for path in told for line in path.read_text("utf-8").splitlines()]
    assert [found for found in lines if by_name.search(found[1])] == []


def test_actions_of_workflows_are_pinned_by_commit() -> None:
    """A tag may be moved to other code, which would run with the rights of a release."""
    pinned = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [
        line.strip() for path in workflows for line in path.read_text("utf-8").splitlines() if "uses:" in line
    ]
    assert used
    assert [line for line in used if not pinned.search(line)] == []
