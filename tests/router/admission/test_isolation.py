"""Salts of tenants and groups: who shares one, and what becomes of a client's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.admission.isolation import Isolation
from kvatlas.router.admission.key_file import KeyFileError, KeySettings, KeyStats, TenantRules
from kvatlas.router.openai.apis import CHAT, COHERE
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.members import at_once, with_value

SECRET = "s" * 32
PLAIN, RED, BLUE = TenantRules(), TenantRules(cache_group="red"), TenantRules(cache_group="blue")


def isolation(
    folder: Path,
    isolate: Literal["tenant", "group"] = "tenant",
    *,
    secret: str = SECRET,
    clients: Literal["combine", "refuse"] = "combine",
    clock: Any = lambda: 0.0,
) -> Isolation:
    path = folder / "secret"
    path.write_text(secret)
    settings = KeySettings(
        file="keys.toml", isolate=isolate, isolate_secret_file=str(path), client_salts=clients
    )
    return Isolation(settings, KeyStats(), clock=clock)


def test_each_tenant_has_a_salt_of_its_own(tmp_path: Path) -> None:
    made = isolation(tmp_path)
    ada, eve = made.salt("ada", RED, b""), made.salt("eve", RED, b"")
    assert ada != eve
    assert made.salt("ada", BLUE, b"null") == ada, "groups do not count here"
    assert isolation(tmp_path).salt("ada", PLAIN, b"") == ada, "as another router makes it"
    assert isolation(tmp_path, secret="t" * 32).salt("ada", PLAIN, b"") != ada
    assert len(ada) == 43
    assert not set(ada) & set("@/\\\0"), "which vLLM refuses"


def test_tenants_of_a_group_share_a_salt(tmp_path: Path) -> None:
    made = isolation(tmp_path, "group")
    assert made.salt("ada", RED, b"") == made.salt("eve", RED, b"") != made.salt("ada", BLUE, b"")
    assert made.salt("ada", PLAIN, b"") != made.salt("eve", PLAIN, b"")
    assert made.salt("red", PLAIN, b"") != made.salt("ada", RED, b""), "a tenant named as a group"


def test_a_clients_own_salt_separates_further_or_is_refused(tmp_path: Path) -> None:
    made = isolation(tmp_path)
    salts = {made.salt(tenant, PLAIN, own) for tenant in ("ada", "eve") for own in (b"", b'"a"', b'"b"')}
    assert len(salts) == 6
    strict = isolation(tmp_path, clients="refuse")
    assert strict.salt("ada", PLAIN, b"") == made.salt("ada", PLAIN, b"")
    for own in (b'"a"', b"1", b"[]", b'""'):
        with pytest.raises(ApiError, match="cache_salt"):
            strict.salt("ada", PLAIN, own)
    for own in (b"1", b"{", b'""', json.dumps("a" * 1025).encode()):
        with pytest.raises(ApiError, match="cache_salt"):
            made.salt("ada", PLAIN, own)
    assert (strict.stats.salts_refused, made.stats.salts_refused) == (4, 4)


@pytest.fixture(scope="module")
def by_tenant(tmp_path_factory: pytest.TempPathFactory) -> Isolation:
    return isolation(tmp_path_factory.mktemp("secret"))


_PAIRS = st.tuples(st.text(max_size=8), st.text(min_size=1, max_size=8))


@given(_PAIRS, _PAIRS)
def test_no_name_and_salt_spell_another_name_and_salt(
    by_tenant: Isolation, one: tuple[str, str], other: tuple[str, str]
) -> None:
    salts = {by_tenant.salt(name, PLAIN, json.dumps(own).encode()) for name, own in (one, other)}
    assert len(salts) == len({one, other})


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b' { "model" : "m" }',
        b'{"cache_salt": "mine", "model": "m"}',
        b'{"cache_salt": "mine", "cache\\u005fsalt": "mine too"}',
        b'{"cache\\u005fsalt": "mine", "a": {"cache_salt": 1}, "b": NaN}',
        b'{"cache_salt": null, "messages": [{"cache_salt": "x"}]}',
    ],
)
def test_engines_get_the_routers_salt(body: bytes, tmp_path: Path) -> None:
    made = isolation(tmp_path)
    changed = at_once(with_value(body, b"cache_salt", lambda own: made.salt("ada", PLAIN, own), adds=True))
    before, after = json.loads(body), json.loads(changed)
    own = json.dumps(before["cache_salt"]).encode() if before.get("cache_salt") else b""
    assert after["cache_salt"] == made.salt("ada", PLAIN, own)
    rest = {name: value for name, value in after.items() if name != "cache_salt"}
    assert repr(rest) == repr({name: value for name, value in before.items() if name != "cache_salt"})


@pytest.mark.parametrize(
    "path", [COHERE, "/v2/embed", "/v1/audio/transcriptions", "/v1/new_api", "/v1//chat/completions"]
)
def test_an_api_that_is_not_known_to_take_a_salt_is_refused(path: str, tmp_path: Path) -> None:
    made = isolation(tmp_path)
    for known in (CHAT, "/v1/embeddings", "/v2/rerank"):
        made.check(known, is_form=False, names_media=False)
    with pytest.raises(ApiError, match=re.escape(path) + ".*no cache_salt.*proxy.passed_paths"):
        made.check(path, is_form=False, names_media=False)
    assert made.stats.salts_refused == 1


def test_a_form_and_media_by_a_clients_name_are_refused(tmp_path: Path) -> None:
    made = isolation(tmp_path)
    with pytest.raises(ApiError, match="A form for /v1/embeddings takes no cache_salt"):
        made.check("/v1/embeddings", is_form=True, names_media=False)
    with pytest.raises(ApiError, match="without a uuid or mm_hashes"):
        made.check(CHAT, is_form=False, names_media=True)


def test_a_new_secret_makes_new_salts_and_a_bad_one_none(tmp_path: Path) -> None:
    now = [0.0]
    made = isolation(tmp_path, clock=lambda: now[0])
    first = made.salt("ada", PLAIN, b"")
    path = tmp_path / "secret"
    path.write_text("too short")
    now[0] += 2
    assert made.salt("ada", PLAIN, b"") == first
    assert made.stats.isolate_secret_failures == 1
    path.write_text("t" * 40)
    now[0] += 2
    assert made.salt("ada", PLAIN, b"") != first


@pytest.mark.parametrize("secret", ["", "s" * 31, "s" * 5000])
def test_an_unusable_secret_is_an_error_at_start(secret: str, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"keys.isolate_secret_file: .* bytes, expected 32 to 4096"):
        isolation(tmp_path, secret=secret)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs keys.file"):
        KeySettings(isolate="tenant", isolate_secret_file="x")
    with pytest.raises(ValueError, match=r"needs keys.isolate_secret_file"):
        KeySettings(isolate="group", file="x")
