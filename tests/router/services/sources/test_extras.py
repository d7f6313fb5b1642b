"""A source whose library is missing is refused at the start, with the extra that brings it."""

from __future__ import annotations

import sys

import msgspec
import pytest

from kvatlas.router.fleet.engines import CannotStartError
from kvatlas.router.fleet.settings import DnsSettings, FleetSettings, KubernetesSettings
from kvatlas.router.services.sources import configured_sources


@pytest.mark.parametrize(
    ("section", "library", "module", "settings"),
    [
        ("kubernetes", "lightkube", "kubernetes.source", KubernetesSettings(selector="app=vllm")),
        ("dns", "dns", "dns_source", DnsSettings(names=("vllm.example:8000",))),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    library: str,
    module: str,
    settings: DnsSettings | KubernetesSettings,
) -> None:
    loaded = [name for name in sys.modules if name.partition(".")[0] == library]
    for name in [*loaded, f"kvatlas.router.services.{module}"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CannotStartError, match=rf"fleet\.{section}: .*'\.\[{section}\]'"):
        list(configured_sources(msgspec.structs.replace(FleetSettings(), **{section: settings})))
