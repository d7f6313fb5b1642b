"""The sample of scripts/power.py stays the same but for the lines that change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import script


def test_a_change_redraws_only_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power = script("power")
    monkeypatch.setattr(power, "ROOT", tmp_path)

    def drawn(code: str) -> list[str]:
        (tmp_path / "part.py").write_text(code)
        power._source.cache_clear()
        return [power.shown(one).split(": ", 1)[1] for one in power.sample("part", 99, 1)]

    code = "".join(f"def f{i}(a):\n    if a:\n        return a + {i}\n    return 1\n" for i in range(20))
    before = drawn(code)
    after = drawn("def g(a):\n    return a < 1\n\n" + code.replace("a + 7", "a * 7"))
    assert len(before) + 1 == len(after) == 41
    changed = ("a + 7", "a * 7", "a < 1")
    assert [one for one in before if not one.endswith(changed)] == [
        one for one in after if not one.endswith(changed)
    ]
