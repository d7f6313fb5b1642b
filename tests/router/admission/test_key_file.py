"""The key file: read strictly, replaced while the router runs, written by ``kvatlas keys``."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvatlas.router.__main__ import run
from kvatlas.router.admission.key_file import KeyFile, KeyFileError, digest_of, read_key_file


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


def entry(tenant: str, key: str) -> str:
    return f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key)}"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants.a]\nrequests_per_minute = 0\n", "tenants.a.requests_per_minute = 0: Expected `int` >= 1"),
        (
            "[tenants.a]\n[tenants.b]\nrequest_per_minute = 5\n",
            "tenants.b: Object contains unknown field `request_per_minute`; expected wait_target_s, ",
        ),
        ("[tenants.a]\nwait_target_low_s = 0.0\n", "tenants.a: wait_target_low_s = 0.0: expected seconds"),
        ('[tenants."a b"]\n', "'a b'"),
        (entry("a", "k"), "keys[0].tenant = 'a': add [tenants.a]"),
        ("[tenants.a]\n" + entry("a", "k") * 2, "keys[1].sha256: this key stands there twice"),
        ('[tenants.a]\n[[keys]]\ntenant = "a"\nsha256 = "key itself"\n', "keys[0].sha256: Expected 64 hexa"),
        ("tenants = 3\n", "tenants: Expected `object`"),
        ('[tenants.a]\npriority = "top"\n', "tenants.a.priority = 'top': Invalid enum value 'top'"),
        ('[tenants.a]\npriority = "top"\n', "priority (high, normal, low)"),
        ('[tenants.a]\n[[keys]]\nowner = "a"\n', "unknown field `owner`; expected tenant, sha256"),
        ("[[key]]\n", "unknown field `key`; expected tenants, keys"),
        ("[tenants", "Expected"),
        ("\xff", ""),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError) as caught:
        read_key_file(path)
    assert str(caught.value).startswith(f"keys.file: {path}: ")
    assert said in str(caught.value)


def tenant_of(keys: KeyFile, key: bytes) -> str | None:
    owner = keys.owner_of(key)
    return None if owner is None else owner[0]


def test_keys_come_and_go_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.a]\n" + entry("a", "first"))
    keys = KeyFile(path, clock=Clock())
    assert (tenant_of(keys, b"first"), tenant_of(keys, b"second"), tenant_of(keys, b"")) == ("a", None, None)
    path.write_text("[tenants.a]\n[tenants.b]\nconcurrent_requests = 3\n" + entry("b", "second"))
    assert (tenant_of(keys, b"first"), tenant_of(keys, b"second")) == (None, "b")
    assert keys.rules("b").concurrent_requests == 3
    path.write_text("[tenants")
    assert tenant_of(keys, b"second") == "b", "an unusable file changes nothing"
    path.unlink()
    assert tenant_of(keys, b"second") == "b"


def test_keys_add_prints_the_key_once_and_stores_its_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    for tenant in ("acme", "acme", "umbrella.corp"):
        assert run(["keys", "add", "--file", str(path), "--tenant", tenant, "--name", 'ci "x"']) == 0
    printed = capsys.readouterr().out.split()
    table = read_key_file(path)
    assert [k.sha256 for k in table.keys] == [digest_of(key) for key in printed]
    assert set(table.tenants) == {"acme", "umbrella.corp"}
    assert path.stat().st_mode & 0o077 == 0
    assert not any(key in path.read_text() for key in printed)
    assert run(["keys", "list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "acme: models *; no limits" in listed
    assert 'ci "x"' in listed


def test_keys_add_keeps_what_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n[tenants.a]\nrequests_per_minute = 5  # few")
    assert run(["keys", "add", "--file", str(path), "--tenant", "a"]) == 0
    assert path.read_text().startswith("# ours\n[tenants.a]\nrequests_per_minute = 5  # few\n")
    assert read_key_file(path).tenants["a"].requests_per_minute == 5


def test_an_own_key_by_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    command = ["keys", "add", "--file", str(path), "--tenant", "a", "--stdin"]
    monkeypatch.setattr("sys.stdin", io.StringIO("sixteen-signs-ok\n" * 2))
    assert run(command) == 0
    assert read_key_file(path).keys[0].sha256 == digest_of("sixteen-signs-ok")
    before = path.read_text()
    assert run(command) == 2
    assert "this key exists already" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("fifteen-signs-x\n"))
    assert run(command) == 2
    assert "at least 16" in capsys.readouterr().err
    assert path.read_text() == before
