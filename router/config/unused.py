"""Settings that have no effect, since what switches them on is not set."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from kvatlas.router.admission.key_file import WaitTargets
from kvatlas.router.config.schema import Config

# Sections whose settings have no effect unless one of these is given.
_SWITCHES: dict[str, tuple[str, ...]] = {
    "queue": ("queue.saturation_s",),
    "pull": ("pull.enabled",),
    "usage": ("usage.path",),
    "traces": ("traces.endpoint",),
    "keys": ("keys.file",),
    "index": ("index.url",),
    "fleet.file": ("fleet.file.path",),
    "fleet.dns": ("fleet.dns.names",),
    "fleet.kubernetes": tuple(
        f"fleet.kubernetes.{name}" for name in ("selector", "service_selector", "inference_pool")
    ),
    "admin": ("admin.enabled",),
    "epp": ("epp.listen",),
    "cors": ("cors.allowed_origins",),
}
# Single settings of other sections, likewise.
_KEY_SWITCHES: dict[str, str] = {
    "fleet.probes_max": "fleet.probe",
    "keys.client_salts": "keys.isolate",
    "policy.slo_ttft_ms_high": "policy.service_levels",
    "policy.slo_ttft_ms_normal": "policy.service_levels",
    "policy.slo_ttft_ms_low": "policy.service_levels",
    "prompts.hub_endpoint": "prompts.hub_downloads",
    "prompts.hub_timeout_s": "prompts.hub_downloads",
}


def without_effect(config: Config) -> list[str]:
    """Return the settings that differ from their default and have no effect, with the reason."""
    defaults_of, found = Config(), []
    used = {f"queue.{name}" for name in WaitTargets.__struct_fields__}  # they refuse without a queue, too
    used |= {config.ops_tokens[0]} if config.ops_tokens is not None else set()
    for key, switch in _KEY_SWITCHES.items():
        differs = attrgetter(key)(config) != attrgetter(key)(defaults_of)
        if differs and attrgetter(switch)(config) in (None, False, "off"):
            found.append(f"{key} has no effect without {switch}")
    for section, switches in _SWITCHES.items():
        settings, defaults = attrgetter(section)(config), attrgetter(section)(Config())
        if any(attrgetter(switch)(config) for switch in switches):
            continue
        given = [
            f"{section}.{name}"
            for name in settings.__struct_fields__
            if f"{section}.{name}" not in {*switches, *used}
            and getattr(settings, name) != getattr(defaults, name)
            and not isinstance(getattr(settings, name), msgspec.Struct)
        ]
        found += [f"{key} has no effect without {' or '.join(switches)}" for key in given]
    return found
