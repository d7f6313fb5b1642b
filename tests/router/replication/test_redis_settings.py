"""URLs and settings: every form, every fault named, and no password ever shown."""

from __future__ import annotations

import pytest

from kvatlas.router.replication.index_url import SettingsError, Target, has_password, parse_url, redacted
from kvatlas.router.replication.settings import SharedSettings


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://host", Target("server", (("host", 6379),))),
        ("valkey://host:7000/3", Target("server", (("host", 7000),), db=3)),
        ("redis://[::1]:7000", Target("server", (("::1", 7000),))),
        ("rediss://host/0", Target("server", (("host", 6379),), tls=True)),
        (
            "rediss://user:p%40ss@host:1/2?ca=/ca.pem&cert=/c.pem&key=/k.pem",
            Target(
                "server",
                (("host", 1),),
                2,
                username="user",
                password="p@ss",
                tls=True,
                ca="/ca.pem",
                cert="/c.pem",
                key="/k.pem",
            ),
        ),
        ("redis://:secret@host", Target("server", (("host", 6379),), password="secret")),
        ("redis+cluster://a:1,b:2,c", Target("cluster", (("a", 1), ("b", 2), ("c", 6379)))),
        (
            "rediss+sentinel://u:p@a,b:2/main/4",
            Target("sentinel", (("a", 26379), ("b", 2)), 4, "main", "u", "p", tls=True),
        ),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://host", "scheme 'http'"),
        ("redis+ring://host", "scheme"),
        ("host:6379", "expected redis://HOST:PORT/DB"),
        ("redis:/host:6379/0", "no host: expected redis://HOST:PORT/DB"),
        ("redis://host/db", "'db' is no database number: expected redis://HOST:PORT/DB"),
        ("redis://host/1/2", "database number"),
        ("redis+cluster://host/1", "database 0 only"),
        ("redis+sentinel://host", "master's name"),
        ("redis://host:port", "bad address"),
        ("redis://host?timeout=3", "'timeout'"),
    ],
)
def test_bad_urls_are_named_without_secrets(url: str, why: str) -> None:
    with_secret = url.replace("://", "://user:hunter2@")
    for form in (url, with_secret):
        with pytest.raises(SettingsError, match=why) as raised:
            SharedSettings(url=form)
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a{b}"}, "namespace"),
        ({"namespace": "x" * 33}, "namespace"),
        ({"code_bytes": 3}, "code_bytes"),
        ({"partitions": 3}, "power of two"),
        ({"partitions": 128}, "power of two"),
        ({"renew_s": 3.0}, "renew_s"),
        ({"lease_s": 4000.0}, "lease_s"),
    ],
)
def test_bad_settings(changes: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        SharedSettings(url="redis://host", **changes)  # type: ignore[arg-type]


def test_passwords_are_not_shown() -> None:
    url = "redis://user:hunter2@host:1/0"
    settings = SharedSettings(url=url)
    for shown in (repr(settings), str(settings), f"{settings}", repr(parse_url(url)), str(parse_url(url))):
        assert "hunter2" not in shown
        assert "host:1" in shown
    assert redacted(url) == "redis://user:***@host:1/0"
    assert redacted("redis://user@host") == "redis://user@host"
    assert redacted("redis+cluster://:hunter@2@a:1,b:2") == "redis+cluster://:***@a:1,b:2"
    assert has_password(url)
    assert not has_password("redis://user@host:1/0")
