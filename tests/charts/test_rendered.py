"""Kubernetes accepts the rendered chart, for every combination that users start from."""

from __future__ import annotations

import io
import re
import shlex
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.charts.chart import CHART, MINIMAL, Document, Rendered, examples, load
from tests.charts.crds import SPECS
from tests.support.examples import some
from tests.support.paths import ROOT

VERSIONS = ("1.27", "1.31", "1.37")
EVERYTHING: dict[str, Any] = {
    "replicaCount": 2,
    "commonLabels": {"team": "inference"},
    "commonAnnotations": {"owner": "inference"},
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "engines": {
        "selector": {"app": "vllm"},
        "namespaces": ["blue", "green"],
        "static": [{"base_url": "http://10.0.0.9:8000", "events": "tcp://10.0.0.9:5557", "dp_rank": 1}],
        "apiKey": {"existingSecret": "engine-key"},
    },
    "model": {
        "tokenizer": {"existingClaim": "models", "path": "a/b"},
        "settings": {"mamba_cache_mode": "align"},
    },
    "models": {
        "other.model": {"tokenizer": {"existingClaim": "models"}, "settings": {"lora_paths": {"x": "/y"}}}
    },
    "valkey": {"enabled": True},
    "admin": {"enabled": True, "existingSecret": "admin"},
    "ops": {"existingSecret": "ops"},
    "keys": {"existingSecret": "keys"},
    "tls": {"existingSecret": "certificate"},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": ["llm.example"],
        "tls": [{"hosts": ["llm.example"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example"]},
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "high",
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
    "extraArgs": ["--log-level=debug"],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "initContainers": [{"name": "first", "image": "busybox:1"}],
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {}}
    ],
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
}
CLUSTER_WIDE = {
    "engines": {"selector": {"app": "vllm"}, "clusterWide": True},
    "networkPolicy": {"enabled": True},
}
GATEWAY: dict[str, Any] = {
    **{key: value for key, value in EVERYTHING.items() if key != "ingress"},
    "mode": "gateway",
    "engines": {**EVERYTHING["engines"], "namespaces": []},
    "gateway": {
        "pool": {"name": "qwen", "targetPorts": [8000, 8001], "failureMode": "FailOpen"},
        "provider": "gke",
        "fallbacks": 2,
    },
}
FOREIGN_POOL: dict[str, Any] = {
    "mode": "gateway",
    "gateway": {"pool": {"create": False, "name": "qwen"}},
    "networkPolicy": {"enabled": True},
}
STATIC_ONLY = {"engines": {"static": [{"base_url": "http://10.0.0.9:8000"}]}}

CASES = {
    "bare": MINIMAL,
    "everything": EVERYTHING,
    "cluster-wide": CLUSTER_WIDE,
    "static": STATIC_ONLY,
    "gateway with everything": GATEWAY,
    "a pool of others": FOREIGN_POOL,
    **{path.stem: load(path) for path in examples()},
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(CASES[request.param])


def _check(document: Document, version: str) -> None:
    spec = SPECS.get((document["apiVersion"], document["kind"]))
    if spec is None:
        kubernetes_validate.validate(document, version, strict=True)
    else:
        jsonschema.validate(document["spec"], spec)


@pytest.mark.parametrize("version", some(VERSIONS, 3))
def test_every_document_is_valid(case: Rendered, version: str) -> None:
    for document in case.documents:
        _check(document, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_engine_manifest_is_valid(version: str) -> None:
    kubernetes_validate.validate(load(ROOT / "examples" / "vllm-engine.yaml"), version, strict=True)


@pytest.mark.parametrize("name", ["minimal", "production", "gateway"])
def test_examples_select_the_example_of_an_engine(name: str) -> None:
    pod = load(ROOT / "examples" / "vllm-engine.yaml")["spec"]["template"]
    selector = load(ROOT / "examples" / f"{name}.yaml")["engines"]["selector"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    assert "--set engines.selector.app=vllm" in (ROOT / "docs/kubernetes.md").read_text("utf-8")
    assert pod["spec"]["containers"][0]["args"][0] in (ROOT / "docs/kubernetes.md").read_text("utf-8")


def test_a_misspelt_field_would_be_noticed() -> None:
    document = Rendered(MINIMAL).one("Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["resourcez"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        _check(document, "1.31")


def test_names_are_unique_and_short_enough(case: Rendered) -> None:
    names = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in case.documents]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, _, name in names)


def test_long_release_names_stay_within_limits() -> None:
    rendered = Rendered(EVERYTHING, name="a" * 53)
    assert all(len(d["metadata"]["name"]) <= 63 for d in rendered.documents)
    assert rendered.one("StatefulSet")["metadata"]["name"].endswith("-valkey")


def test_pods_fit_the_restricted_profile(case: Rendered) -> None:
    for document in case.documents:
        spec = (
            document["spec"]
            if document["kind"] == "Pod"
            else document.get("spec", {}).get("template", {}).get("spec")
        )
        if not spec:
            continue
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]


def test_selectors_never_change_with_the_version(case: Rendered) -> None:
    for document in [*case.all("Deployment"), *case.all("StatefulSet")]:
        labels = document["spec"]["selector"]["matchLabels"]
        assert set(labels) == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
        assert labels.items() <= document["spec"]["template"]["metadata"]["labels"].items()


def test_volumes_and_mounts_match(case: Rendered) -> None:
    mounted = {mount["name"] for mount in case.container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in case.pod["volumes"]}


def test_replicas_are_left_to_the_autoscaler() -> None:
    rendered = Rendered(load(ROOT / "examples" / "production.yaml"))
    assert "replicas" not in rendered.one("Deployment")["spec"]
    assert Rendered({**MINIMAL, "replicaCount": 0}).one("Deployment")["spec"]["replicas"] == 0


def test_rights_are_no_more_than_needed() -> None:
    rendered = Rendered(EVERYTHING)
    assert [d["metadata"]["namespace"] for d in rendered.all("Role")] == ["blue", "green"]
    rules = [rule for role in rendered.all("Role") for rule in role["rules"]]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {resource for rule in rules for resource in rule["resources"]} == {"pods"}
    writing = Rendered({"engines": {"selector": {"app": "vllm"}, "deletionCosts": True}}).one("Role")
    (pods,) = writing["rules"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]}
    by_service = Rendered({"engines": {"selector": {"app": "vllm"}, "readyBy": "vllm"}}).one("Role")
    assert [rule["resources"] for rule in by_service["rules"]] == [["pods"], ["endpointslices"]]
    assert not rendered.all("ClusterRole")
    assert not Rendered(STATIC_ONLY).all("Role")
    assert Rendered(STATIC_ONLY).pod["automountServiceAccountToken"] is False
    assert Rendered(CLUSTER_WIDE).one("ClusterRole")
    assert not Rendered(CLUSTER_WIDE).all("Role")


def test_roles_are_bound_to_the_routers_account(case: Rendered) -> None:
    roles = [(d["kind"], d["metadata"]) for kind in ("Role", "ClusterRole") for d in case.all(kind)]
    bindings = case.all("RoleBinding") + case.all("ClusterRoleBinding")
    assert len(bindings) == len(roles)
    for binding, (kind, metadata) in zip(bindings, roles, strict=True):
        assert binding["kind"] == f"{kind}Binding"
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (kind, metadata["name"])
        assert binding["metadata"].get("namespace") == metadata.get("namespace")
        subjects = [(s["kind"], s["name"], s["namespace"]) for s in binding["subjects"]]
        assert subjects == [("ServiceAccount", case.pod["serviceAccountName"], "llm")]


def test_a_picker_reads_its_pool_alone() -> None:
    for values, pool in (
        (GATEWAY, "qwen"),
        (FOREIGN_POOL, "qwen"),
        ({**MINIMAL, "mode": "gateway"}, "kvatlas"),
    ):
        rules = {rule["resources"][0]: rule for rule in Rendered(values).one("Role")["rules"]}
        assert set(rules) == {"pods", "inferencepools"}
        assert rules["inferencepools"]["resourceNames"] == [pool]
        assert rules["inferencepools"]["verbs"] == ["get", "list", "watch"]


def test_gateway_pool_route_and_picker_name_each_other() -> None:
    rendered = Rendered(GATEWAY)
    pool, service = rendered.one("InferencePool"), rendered.one("Service", suffix="kvatlas")
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
    assert pool["spec"]["selector"]["matchLabels"] == {"app": "vllm"}
    route = rendered.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert [(ref["kind"], ref["name"]) for ref in route] == [("InferencePool", pool["metadata"]["name"])]
    for policy in ("HealthCheckPolicy", "GCPBackendPolicy"):
        assert rendered.one(policy)["spec"]["targetRef"]["name"] == pool["metadata"]["name"]
    assert not Rendered(FOREIGN_POOL).all("InferencePool")
    istio = Rendered(load(ROOT / "examples" / "gateway.yaml"))
    assert istio.one("DestinationRule")["spec"]["host"] == "kvatlas"


def test_gateways_are_configured_by_the_values() -> None:
    pool = {"targetPorts": [8001, 8002], "failureMode": "FailOpen"}
    told = {"provider": "gke", "timeoutSeconds": 123, "pool": pool}
    rendered = Rendered({**MINIMAL, "mode": "gateway", "gateway": told})
    spec = rendered.one("InferencePool")["spec"]
    assert spec["targetPorts"] == [{"number": 8001}, {"number": 8002}]
    assert spec["endpointPickerRef"]["failureMode"] == "FailOpen"
    health = rendered.one("HealthCheckPolicy")["spec"]["default"]["config"]["httpHealthCheck"]
    assert health == {"requestPath": "/health", "port": 8001}
    assert rendered.one("GCPBackendPolicy")["spec"]["default"]["timeoutSec"] == 123
    istio = Rendered({**MINIMAL, "mode": "gateway", "gateway": {"provider": "istio"}})
    # The picker's certificate is its own: a rule that verified it would let nothing through.
    assert istio.one("DestinationRule")["spec"]["trafficPolicy"] == {
        "tls": {"mode": "SIMPLE", "insecureSkipVerify": True}
    }
    assert istio.one("InferencePool")["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"


def test_a_picker_is_probed_by_grpc_on_its_plain_port() -> None:
    container = Rendered({**MINIMAL, "mode": "gateway"}).container
    assert container["args"][0] == "epp"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = {name: container[f"{name}Probe"]["grpc"]["service"] for name in ("liveness", "readiness")}
    assert services == {"liveness": "liveness", "readiness": "readiness"}
    assert container["livenessProbe"]["grpc"]["port"] == ports["health"]


def test_a_changed_configuration_starts_new_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = Rendered(values).one("Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum(MINIMAL) == checksum({**MINIMAL, "podLabels": {"a": "b"}})
    assert checksum(MINIMAL) != checksum({**MINIMAL, "policy": "hash"})


def test_a_stopping_router_has_time_for_its_streams() -> None:
    rendered = Rendered({**MINIMAL, "drainSeconds": 120, "drainDelaySeconds": 7})
    assert rendered.config["listen"]["drain_s_max"] == 120
    assert rendered.pod["terminationGracePeriodSeconds"] > 127
    assert rendered.config["listen"]["drain_delay_s"] == 7


@pytest.mark.parametrize(("mode", "section"), [("proxy", "listen"), ("gateway", "epp")])
def test_the_pod_has_the_time_that_the_configuration_gives(mode: str, section: str) -> None:
    drain = {section: {"drain_s_max": 900, "drain_delay_s": 7.5}}
    assert Rendered({**MINIMAL, "mode": mode, "config": drain}).pod["terminationGracePeriodSeconds"] == 918


def test_mounted_secrets_are_not_for_everybody() -> None:
    def modes(values: dict[str, Any]) -> dict[str, int | None]:
        volumes = Rendered(values).pod["volumes"]
        return {one["name"]: one["secret"].get("defaultMode") for one in volumes if "secret" in one}

    tls = {"redis": {"existingSecret": "url", "tls": {"existingSecret": "ca"}}, "valkey": {"enabled": False}}
    names = {"admin", "engine-key", "index", "keys", "ops", "redis-tls", "tls"}
    assert modes({**EVERYTHING, **tls}) == dict.fromkeys(names, 0o440)
    anybody = {**EVERYTHING, **tls, "podSecurityContext": {"fsGroup": None}}
    assert modes(anybody) == dict.fromkeys(names), "the router's user could not read them"


def test_streams_leave_an_engine_before_its_pod_is_killed() -> None:
    drain = {"seconds": 25, "gracePeriodSeconds": 30}
    rendered = Rendered({"engines": {"selector": {"a": "b"}, "drain": drain}})
    assert rendered.config["proxy"] == {"move_drained_s": 25}
    assert "proxy" not in Rendered(MINIMAL).config
    off = Rendered({"engines": {"selector": {"a": "b"}, "continueStreams": False}})
    assert off.config["proxy"] == {"continue_streams": False}


def test_an_engines_pod_waits_for_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = load(ROOT / "examples" / "vllm-engine.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python3", "-c"]
    pages = ["running 2, waiting 0", "running 0, waiting 1", "running 0, waiting 0"]
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def page(url: str, timeout: float) -> io.BytesIO:
        assert url == f"http://127.0.0.1:{container['ports'][0]['containerPort']}/metrics"
        told = pages.pop(0) if len(pages) > 1 else pages[0]
        lines = ["vllm:num_requests_" + one.replace(" ", '{engine="0"} ') + ".0" for one in told.split(", ")]
        return io.BytesIO("\n".join(["# HELP x", *lines, "vllm:num_preemptions_total 9.0"]).encode())

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(urllib.request, "urlopen", page)
    exec(command[2], {})
    assert (now_s, pages) == (7.0, ["running 0, waiting 0"])
    pages[0] = "running 1, waiting 0"
    exec(command[2], {})
    # SIGTERM, and then SIGKILL at the end of the grace period.
    assert now_s - 7.0 <= pod["terminationGracePeriodSeconds"] - 5


def test_no_secret_is_in_the_configuration() -> None:
    rendered = Rendered(EVERYTHING)
    secret = rendered.one("Secret")["stringData"]
    assert secret["password"] in secret["url"]
    for document in rendered.documents:
        if document["kind"] != "Secret":
            assert secret["password"] not in str(document)


def test_service_variables_cannot_be_mistaken_for_settings(case: Rendered) -> None:
    assert case.pod["enableServiceLinks"] is False


def test_the_notes_name_the_release() -> None:
    notes = Rendered(MINIMAL, name="blue", namespace="inference").notes
    assert "service/blue-kvatlas" in notes
    assert "-n inference" in notes
    assert "that the engines say they serve" in notes
    off = {**MINIMAL, "model": {"tokenizer": {"download": False}}}
    assert "No tokenizer was given" in Rendered(off).notes


def test_the_tokenizer_may_come_from_the_hub() -> None:
    tokenizer = {
        "repo": "org/model",
        "revision": "v1",
        "endpoint": "https://mirror.example",
        "hfTokenSecret": {"name": "hub", "key": "token"},
        "cache": {"existingClaim": "cache"},
    }
    values = {
        **MINIMAL,
        "model": {"tokenizer": tokenizer},
        "models": {"other": {"tokenizer": {"repo": "org/other"}}},
        "networkPolicy": {"enabled": True, "hubCIDRs": ["10.1.0.0/16"], "hubPorts": [8443]},
    }
    rendered = Rendered(values)
    models = rendered.config["models"]
    assert (models["*"]["tokenizer"], models["other"]["tokenizer"]) == ("org/model@v1", "org/other")
    assert rendered.config["prompts"] == {"hub_endpoint": "https://mirror.example"}
    env = {one["name"]: one for one in rendered.container["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    mounts = {one["name"]: one for one in rendered.container["volumeMounts"]}
    assert mounts["tokenizer-cache"]["mountPath"] == env["HF_HOME"]["value"]
    assert "readOnly" not in mounts["tokenizer-cache"]
    volumes = {one["name"]: one for one in rendered.pod["volumes"]}
    assert volumes["tokenizer-cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
    hub = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 8443, "protocol": "TCP"}]}
    assert hub in rendered.one("NetworkPolicy")["spec"]["egress"]
    off = Rendered({**values, "model": {"tokenizer": {"download": False}}})
    assert hub not in off.one("NetworkPolicy")["spec"]["egress"]
    assert off.config["prompts"] == {"hub_downloads": False}
    assert "emptyDir" in {one["name"]: one for one in off.pod["volumes"]}["tokenizer-cache"]


def _set(values: dict[str, Any], setting: str) -> None:
    """As ``helm --set``: paths with at most the first item of a list, words that YAML reads."""
    path, _, text = setting.partition("=")
    *above, last = path.split(".")
    table = values
    for name in above:
        inner = {}
        if name.endswith("[0]"):
            table[name.removesuffix("[0]")] = [inner]
            table = inner
        else:
            table = table.setdefault(name, inner)
    table[last] = yaml.safe_load(text)


HELM = re.compile(r"^helm (?:install|upgrade|template) kvatlas kvatlas-\S+ (.*)$")
COMMANDS = [
    (path.name, found[1])
    for path in [*sorted((ROOT / "docs").glob("*.md")), CHART / "README.md"]
    for line in path.read_text("utf-8").replace("\\\n", " ").splitlines()
    if (found := HELM.match(line)) and "--set" in line
]


@pytest.mark.parametrize("command", COMMANDS, ids=[page for page, _ in COMMANDS])
def test_helm_commands_of_pages_render(command: tuple[str, str]) -> None:
    """With the values of those before it, if it is an upgrade of theirs."""
    words = shlex.split(command[1])
    values: dict[str, Any] = {**MINIMAL} if {"--reuse-values", "..."} & set(words) else {}
    for setting in [after for word, after in pairwise(words) if word == "--set"]:
        _set(values, setting)
    assert Rendered(values).container["args"]


def test_pages_have_helm_commands() -> None:
    assert {page for page, _ in COMMANDS} == {"gateway.md", "kubernetes.md", "README.md"}


NEGATIVE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({**MINIMAL, "engins": {}}, "engins"),
    "unknown nested key": ({**MINIMAL, "service": {"prot": 1}}, "prot"),
    "wrong type": ({**MINIMAL, "replicaCount": "two"}, "/replicaCount"),
    "not in the list": ({**MINIMAL, "logLevel": "loud"}, "/logLevel"),
    "password in an open value": ({**MINIMAL, "redis": {"url": "redis://:secret@host"}}, "/redis/url"),
    "bad digest": ({**MINIMAL, "image": {"digest": "sha256:12"}}, "/image/digest"),
    "no image": ({**MINIMAL, "image": {"repository": ""}}, "image.repository"),
    "no engines": ({}, "engines.selector"),
    "an engine without a scheme": ({"engines": {"static": [{"base_url": "10.0.0.9:8000"}]}}, "/base_url"),
    "a port beside the Service's": ({**MINIMAL, "config": {"server": {"port": 9000}}}, "service.port"),
    "replicas without an index": ({**MINIMAL, "replicaCount": 2}, "redis.url"),
    "two indexes": (
        {**MINIMAL, "valkey": {"enabled": True}, "redis": {"url": "redis://a"}},
        "valkey.enabled",
    ),
    "admin without a token": ({**MINIMAL, "admin": {"enabled": True}}, "admin.existingSecret"),
    "ingress without a host": ({**MINIMAL, "ingress": {"enabled": True}}, "ingress.hosts"),
    "route without a gateway": ({**MINIMAL, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
    "scraped twice": (
        {**MINIMAL, "serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
        "podMonitor.enabled",
    ),
    "scraped behind a closed port": ({**MINIMAL, "serviceMonitor": {"enabled": True}}, "ops.existingSecret"),
    "two listeners on one port": (
        {**MINIMAL, "admin": {"enabled": True, "existingSecret": "admin"}, "ops": {"port": 8081}},
        "ops.port",
    ),
    "fewest above most": (
        {**MINIMAL, "valkey": {"enabled": True}, "autoscaling": {"enabled": True, "minReplicas": 9}},
        "autoscaling.minReplicas",
    ),
    "scaling without a request": (
        {
            **MINIMAL,
            "valkey": {"enabled": True},
            "autoscaling": {"enabled": True},
            "resources": {"requests": {"cpu": None}},
        },
        "resources.requests.cpu",
    ),
    "namespaces twice": (
        {"engines": {"selector": {"a": "b"}, "clusterWide": True, "namespaces": ["x"]}},
        "engines.namespaces",
    ),
    "a pool without pods": ({"mode": "gateway"}, "engines.selector"),
    "a pool without a name": (
        {**MINIMAL, "mode": "gateway", "gateway": {"pool": {"create": False}}},
        "gateway.pool.name",
    ),
    "pools of other namespaces": (
        {"mode": "gateway", "engines": {"selector": {"a": "b"}, "namespaces": ["x"]}},
        "engines.namespaces",
    ),
    "clients of a picker": (
        {**MINIMAL, "mode": "gateway", "ingress": {"enabled": True, "hosts": ["a"]}},
        "ingress.enabled",
    ),
    "ops on the picker's port": ({**MINIMAL, "mode": "gateway", "ops": {"port": 9003}}, "ops.port"),
    "admin without a port": (
        {**MINIMAL, "mode": "gateway", "admin": {"enabled": True, "existingSecret": "a", "port": 0}},
        "admin.port",
    ),
    "nine target ports": (
        {**MINIMAL, "mode": "gateway", "gateway": {"pool": {"targetPorts": list(range(1, 10))}}},
        "targetPorts",
    ),
    "empty setting": ({**MINIMAL, "config": {"proxy": {"attempts_max": None}}}, "config.proxy.attempts_max"),
    "a drain without an effect": (
        {"engines": {"selector": {"a": "b"}, "continueStreams": False, "drain": {"seconds": 10}}},
        "engines.continueStreams=true",
    ),
    "a drain that the pod does not live to see": (
        {"engines": {"selector": {"a": "b"}, "drain": {"seconds": 26}}},
        "engines.drain.seconds: 26 is not 5 s below engines.drain.gracePeriodSeconds (30)",
    ),
    "isolation without keys": ({**MINIMAL, "keys": {"isolate": "tenant"}}, "keys.existingSecret"),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_values_that_cannot_work_are_refused_by_name(name: str) -> None:
    values, key = NEGATIVE[name]
    with pytest.raises(Exception, match=re.escape(key)):
        Rendered(values)


def test_examples_are_all_there() -> None:
    assert {path.stem for path in examples()} == {
        "minimal",
        "production",
        "multi-model",
        "hybrid-offload",
        "gateway",
    }


def test_metrics_named_by_rules_and_dashboard_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    kinds = dict(re.findall(r"^\| `(kvatlas_\w+)` \| (\w+)", page, re.MULTILINE))
    histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    known = {*kinds, *(f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count"))}
    rendered = Rendered({**EVERYTHING, "serviceMonitor": {"enabled": False}})
    rules = str(rendered.one("PrometheusRule"))
    dashboard = Path(ROOT / "charts/kvatlas/files/dashboard.json").read_text()
    for text in (rules, dashboard):
        used = set(re.findall(r"kvatlas_\w+", text))
        assert len(used) > 5
        assert used <= known, used - known


def test_routers_and_valkey_have_the_same_password_and_restart_together() -> None:
    def checksums(rendered: Rendered) -> set[str]:
        pods = [rendered.one(kind)["spec"]["template"] for kind in ("Deployment", "StatefulSet")]
        return {pod["metadata"]["annotations"]["checksum/index"] for pod in pods}

    values = {**MINIMAL, "valkey": {"enabled": True}}
    first, second = Rendered(values), Rendered(values)
    for rendered in (first, second):
        secret = rendered.one("Secret", "-valkey")["stringData"]
        assert f":{secret['password']}@" in secret["url"]
        assert len(checksums(rendered)) == 1
    assert checksums(first) != checksums(second)  # without a cluster each rendering makes a password
    given = {**MINIMAL, "valkey": {"enabled": True, "existingSecret": "kvatlas-index"}}
    assert checksums(Rendered(given)) == checksums(Rendered(given))
    assert not Rendered(given).all("Secret")
    assert (
        "checksum/index"
        not in Rendered(MINIMAL).one("Deployment")["spec"]["template"]["metadata"]["annotations"]
    )


def test_no_name_depends_on_the_clusters_domain() -> None:
    texts = [p.read_text(encoding="utf-8") for p in (CHART / "templates").rglob("*") if p.is_file()]
    assert not any("cluster.local" in text for text in texts)
