"""mTLS on the admin port: no certificate, no word."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from kvatlas.router.api.admin_app import common_name
from kvatlas.router.api.admin_auth import AdminSettings
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.startup_check import check
from tests.router.api.admin.admin_rig import administered, audited
from tests.support.pki import make_authority, make_certificate
from tests.support.whole_router import configure, running

pytestmark = pytest.mark.real  # TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proper authority and an old one, a stranger; a server certificate, and clients of all three."""
    folder = tmp_path_factory.mktemp("pki")
    for ca in ("ca", "old", "other"):
        make_authority(folder, ca, old=ca == "old")
    for name, ca in (("server", "ca"), ("ann", "ca"), ("olga", "old"), ("eve", "other")):
        make_certificate(folder, name, by=ca, old=ca == "old")
    return folder


def settings(pki: Path) -> dict[str, object]:
    return {
        "port": 0,
        "tls_cert_file": str(pki / "server.crt"),
        "tls_key_file": str(pki / "server.key"),
        "client_ca_file": str(pki / "ca.crt"),
    }


def client(pki: Path, name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    if name is not None:
        context.load_cert_chain(pki / f"{name}.crt", pki / f"{name}.key")
    return context


@pytest.mark.parametrize(("name", "authority"), [("ann", "ca"), ("olga", "old")])
async def test_a_certificate_is_enough_and_its_name_is_written_down(
    tmp_path: Path, pki: Path, name: str, authority: str
) -> None:
    """Of an old authority too: one without key usage, which strict verification would refuse."""
    given = {**settings(pki), "client_ca_file": str(pki / f"{authority}.crt")}
    async with (
        running({}) as (one,),
        administered(tmp_path, one, tls=client(pki, name), token_file=None, **given) as admin,
    ):
        with audited() as lines:
            status, _, _ = await admin.ask("POST", "/drain", {"engine": one.base_url}, token=None)
        assert status == 200
        assert [(line["who"], line["action"]) for line in lines] == [(name, "drain")]


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ([("organizationName", "ops"), ("commonName", "ann")], "ann"),
        ([("commonName", "a" * 80)], "a" * 64),
        ([("organizationName", "ops")], "[('organizationName', 'ops')]"),
        ([], "certificate"),
    ],
)
def test_the_name_in_the_log_is_the_common_name_or_the_whole_subject(
    subject: list[tuple[str, str]], name: str
) -> None:
    assert common_name({"subject": tuple((pair,) for pair in subject)}) == name


async def test_certificate_and_token_are_both_wanted_where_both_are_configured(
    tmp_path: Path, pki: Path
) -> None:
    async with (
        running({}) as (one,),
        administered(tmp_path, one, tls=client(pki, "ann"), **settings(pki)) as admin,
    ):
        assert (await admin.ask("GET", token=None))[0] == 401
        assert (await admin.ask("GET"))[0] == 200


@pytest.mark.parametrize("name", [None, "eve"])
async def test_without_a_certificate_of_the_authority_not_a_byte_is_read(
    tmp_path: Path, pki: Path, name: str | None
) -> None:
    async with (
        running({}) as (one,),
        administered(tmp_path, one, tls=client(pki, name), **settings(pki)) as admin,
    ):
        with pytest.raises(aiohttp.ClientError):
            await admin.ask("GET")
        stats = admin.rig.router.admin.stats  # type: ignore[union-attr]
        assert (stats.requests, stats.refused) == (0, {})


def test_unusable_tls_files_are_named_at_start(tmp_path: Path, pki: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    given = {**settings(pki), "tls_cert_file": str(junk)}
    with pytest.raises(ConfigError, match=r"^admin\.tls_cert_file, tls_key_file or client_ca_file: "):
        check(configure(admin=AdminSettings(enabled=True, **given)))  # type: ignore[arg-type]
