# SPDX-License-Identifier: Apache-2.0
"""The Helm chart by helm itself, and all manifests against the published schemas: Kubernetes' own,
and those of the Prometheus operator's custom resources."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.guest.vm import CHECKOUT
from tests.unit.test_packaging import flags

MADE = CHECKOUT / "build/manifests"
CHART = CHECKOUT / "packaging/helm/writeback-exporter"
VERSIONS = ("1.25", "1.37")
"""The oldest Kubernetes that the chart is for, and the newest of the schemas."""
MANIFESTS = [
    *sorted((CHECKOUT / "packaging/kubernetes").glob("*.yml")),
    CHECKOUT / "alerts/prometheusrule.yml",
]
HELMS = {"3": MADE / "helm3/helm", "4": MADE / "helm/helm"}


# Schemas ----------------------------------------------------------------------------------------


def closed(schema: Any) -> Any:
    """A custom resource's schema that refuses what it does not name: a server drops it in silence,
    or warns."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    open_to_all = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "type" in schema and not open_to_all:
        made.setdefault("additionalProperties", False)
    return made


@cache
def custom(kind: str) -> Any:
    path = MADE / f"operator/monitoring.coreos.com_{kind.lower()}s.yaml"
    definition = yaml.safe_load(path.read_text())
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    return closed(version["schema"]["openAPIV3Schema"])


def validate(document: dict[str, Any]) -> None:
    """Raises one of the two packages' ValidationError."""
    for version in VERSIONS:
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            schema = copy.deepcopy(custom(document["kind"]))
            schema["properties"]["metadata"] = {"type": "object"}  # checked as any object's:
            jsonschema.Draft4Validator(schema).validate(document)
            metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
            kubernetes_validate.validate(metadata, version, strict=True)
        else:
            kubernetes_validate.validate(document, version, strict=True)


REFUSAL = (kubernetes_validate.ValidationError, jsonschema.ValidationError)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        validate(document)


WRONG = [
    ("daemonset.yml", ("spec", "template", "spec", "hostPid"), True),
    ("daemonset.yml", ("spec", "template", "spec", "hostPID"), "yes"),
    ("daemonset.yml", ("spec", "template", "spec", "containers", 0, "readiness"), {}),
    ("daemonset.yml", ("spec", "selector"), None),
    ("daemonset.yml", ("metadata", "label"), {}),
    ("podmonitor.yml", ("spec", "podMetricsEndpoints", 0, "honourLabels"), True),
    ("podmonitor.yml", ("spec", "podMetricsEndpoints", 0, "honorLabels"), "true"),
    ("podmonitor.yml", ("spec", "podMetricsEndpoints", 0, "interval"), "soon"),
    ("podmonitor.yml", ("spec", "podMetricsEndpoints", 0, "scheme"), "ftp"),
    ("podmonitor.yml", ("metadata", "label"), {}),
    ("prometheusrule.yml", ("spec", "groups", 0, "rules", 0, "expression"), "up"),
    ("prometheusrule.yml", ("spec", "groups", 0, "interval"), "soon"),
    ("prometheusrule.yml", ("spec", "groups", 0, "name"), None),
]


@pytest.mark.parametrize(("name", "place", "value"), WRONG)
def test_validation_refuses(name: str, place: Sequence[str | int], value: object) -> None:
    """Else what it accepts says nothing. None: without that field."""
    (path,) = (path for path in MANIFESTS if path.name == name)
    document = yaml.safe_load(path.read_text())
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    if value is None:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    with pytest.raises(REFUSAL):
        validate(document)


# The chart --------------------------------------------------------------------------------------


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest) -> Path:
    return HELMS[request.param]


def run(helm: Path, *arguments: object, values: object = None) -> subprocess.CompletedProcess[str]:
    command = [str(helm), *map(str, arguments)]
    if values is not None:
        command += ["--values=-"]
    return subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False
    )


def template(helm: Path, values: object, release: str = "writeback-exporter") -> Any:
    # Helm 3 that is not built by its own Makefile takes the cluster for one of 1.20.
    version = f"--kube-version={VERSIONS[-1]}.0"
    return run(helm, "template", version, release, CHART, values=values)


def test_an_older_kubernetes_is_refused(helm: Path) -> None:
    done = run(helm, "template", "--kube-version=1.24.0", "x", CHART)
    assert done.returncode != 0
    assert "chart requires kubeVersion: >=1.25" in done.stderr


def rendered(
    helm: Path, values: object, release: str = "writeback-exporter"
) -> dict[str, dict[str, Any]]:
    """By kind, and valid."""
    done = template(helm, values, release)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    for document in documents:
        validate(document)
    made = {document["kind"]: document for document in documents}
    assert len(made) == len(documents)
    return made


OF_A_CHART = {
    *(f"app.kubernetes.io/{name}" for name in ("instance", "version", "managed-by")),
    "helm.sh/chart",
}


def plain(document: Any) -> Any:
    """Without a chart's own labels."""
    if isinstance(document, list):
        return [plain(each) for each in document]
    if isinstance(document, dict):
        return {key: plain(each) for key, each in document.items() if key not in OF_A_CHART}
    return document


def test_lint(helm: Path) -> None:
    done = run(helm, "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_default_is_the_manifest(helm: Path) -> None:
    made = rendered(helm, {"podMonitor": {"enabled": True}})
    for name, kind in (("daemonset.yml", "DaemonSet"), ("podmonitor.yml", "PodMonitor")):
        manifest = yaml.safe_load((CHECKOUT / "packaging/kubernetes" / name).read_text())
        assert plain(made.pop(kind)) == manifest
    assert made == {}
    assert set(rendered(helm, {})) == {"DaemonSet"}


def test_selectors_select_the_pods_of_this_release(helm: Path) -> None:
    made = rendered(helm, {"podMonitor": {"enabled": True}, "podLabels": {"a": "b"}}, "other")
    daemonset, monitor = made["DaemonSet"], made["PodMonitor"]
    assert daemonset["metadata"]["name"] == "other-writeback-exporter"
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    wanted = {
        "app.kubernetes.io/name": "writeback-exporter",
        "app.kubernetes.io/instance": "other",
    }
    assert labels == wanted | {"a": "b"}
    for document in (daemonset, monitor):
        assert document["spec"]["selector"]["matchLabels"] == wanted


def pod(made: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod, and its container."""
    spec: dict[str, Any] = made["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("kind", ["secret", "configMap"])
def test_web_config(helm: Path, kind: str) -> None:
    spec, container = pod(rendered(helm, {"webConfig": {kind: "web", "key": "w.yml"}}))
    (file,) = (a for a in container["args"] if a.startswith("--web.config.file="))
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "web-config")
    assert file == f"--web.config.file={mount['mountPath']}/w.yml"
    (volume,) = (v for v in spec["volumes"] if v["name"] == "web-config")
    assert "web" in volume[kind].values()
    # /-/healthy and /-/ready ask for a password as well.
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe] == {"tcpSocket": {"port": "metrics"}}
    if kind == "secret":
        assert volume[kind]["defaultMode"] == 0o440
        assert spec["securityContext"]["fsGroup"] == container["securityContext"]["runAsGroup"]


def test_root(helm: Path) -> None:
    _, container = pod(rendered(helm, {"root": True, "extraCapabilities": ["SYS_RESOURCE"]}))
    context = container["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
    assert (context["privileged"], context["allowPrivilegeEscalation"]) == (False, False)
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["BPF", "PERFMON", "SYS_RESOURCE"]}


def test_pin(helm: Path) -> None:
    spec, container = pod(rendered(helm, {"root": True, "pin": True}))
    (directory,) = (a.split("=")[1] for a in container["args"] if a.startswith("--bpf.pin="))
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == directory)
    assert not mount.get("readOnly")
    (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
    assert volume["hostPath"]["type"] == "DirectoryOrCreate", "root's alone to write to: mode 755"


EVERYTHING = {
    "nameOverride": "exporter",
    "fullnameOverride": "wbx",
    "image": {"repository": "registry/wbx", "tag": "sha256:ab", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "extraArgs": ["--no-collector.io_uring", "--cgroup.collapse=/kubepods[.]slice/.*\"'"],
    "logFormat": "logfmt",
    "livenessProbe": {"httpGet": {"path": "/-/healthy", "port": "metrics", "scheme": "HTTPS"}},
    "readinessProbe": {"tcpSocket": {"port": "metrics"}, "periodSeconds": 30},
    "seccompProfile": {"type": "Localhost", "localhostProfile": "bpf.json"},
    "resources": {"limits": {"memory": "1Gi", "cpu": 1}, "requests": {"memory": "1Gi", "cpu": 0.1}},
    "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute"}],
    "nodeSelector": {"kubernetes.io/arch": "arm64"},
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "maxUnavailable": 1,
    "podAnnotations": {"a/b": "true"},
    "podLabels": {"team": "storage"},
    "podMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "interval": "30s",
        "scrapeTimeout": "10s",
        "scheme": "https",
        "tlsConfig": {"insecureSkipVerify": True},
        "basicAuth": {"username": {"name": "web", "key": "user"}},
        "relabelings": [{"action": "labelmap", "regex": "__meta_kubernetes_node_label_(zone)"}],
        "metricRelabelings": [{"action": "drop", "regex": "a.*", "sourceLabels": ["__name__"]}],
    },
}


def test_every_value_is_of_use(helm: Path) -> None:
    """What is given is found in what is rendered, which is valid."""
    spec, container = pod(made := rendered(helm, EVERYTHING))
    assert made["DaemonSet"]["metadata"]["name"] == "wbx"
    assert container["image"] == "registry/wbx@sha256:ab"
    assert container["imagePullPolicy"] == "Always"
    assert container["args"][-3:] == ["--log.format=logfmt", *EVERYTHING["extraArgs"]]  # type: ignore[misc]
    assert container["securityContext"]["seccompProfile"] == EVERYTHING["seccompProfile"]
    for name in ("livenessProbe", "readinessProbe", "resources"):
        assert container[name] == EVERYTHING[name]
    for name in ("imagePullSecrets", "tolerations", "nodeSelector", "affinity"):
        assert spec[name] == EVERYTHING[name]
    assert spec["priorityClassName"] == "system-node-critical"
    assert made["DaemonSet"]["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1
    metadata = made["DaemonSet"]["spec"]["template"]["metadata"]
    assert metadata["annotations"] == EVERYTHING["podAnnotations"]
    assert metadata["labels"]["team"] == "storage"
    assert metadata["labels"]["app.kubernetes.io/name"] == "exporter"
    monitor = copy.deepcopy(EVERYTHING["podMonitor"])
    assert isinstance(monitor, dict)
    assert made["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint.pop("relabelings")[1:] == monitor.pop("relabelings")
    del monitor["enabled"], monitor["labels"]
    assert endpoint == monitor | {"port": "metrics", "honorLabels": True}


def test_arguments_are_the_program_s(helm: Path) -> None:
    _, container = pod(rendered(helm, EVERYTHING | {"webConfig": {"secret": "web"}}))
    assert {argument.partition("=")[0] for argument in container["args"]} <= flags()


def test_schema_has_every_value() -> None:
    """And values.yaml has all that the schema lets through, but for what a list or map holds."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) == {*values, "global"}
    for name in ("image", "webConfig", "podMonitor"):
        assert set(schema["properties"][name]["properties"]) == set(values[name])
    assert set(EVERYTHING) == set(values) - {"webConfig", "root", "extraCapabilities", "pin"}


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tolerance": []}, "tolerance"),
    ({"image": {"name": "x"}}, "name"),
    ({"image": {"repository": ""}}, "repository"),
    ({"image": {"tag": 1}}, "tag"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    ({"imagePullSecrets": [{}]}, "imagePullSecrets"),
    ({"nameOverride": "UPPER"}, "nameOverride"),
    ({"fullnameOverride": "x" * 64}, "fullnameOverride"),
    ({"extraArgs": "--log.level=debug"}, "extraArgs"),
    ({"extraArgs": ["doctor"]}, "extraArgs"),
    ({"logFormat": "xml"}, "logFormat"),
    ({"webConfig": "web"}, "webConfig"),
    ({"webConfig": {"secret": 5}}, "secret"),
    ({"webConfig": {"key": "../web.yml"}}, "key"),
    ({"webConfig": {"secret": "a", "configMap": "b"}}, "either secret or configMap"),
    ({"livenessProbe": "none"}, "livenessProbe"),
    ({"readinessProbe": []}, "readinessProbe"),
    ({"root": "yes"}, "root"),
    ({"root": True, "extraCapabilities": ["SYS_ADMIN"]}, "extraCapabilities"),
    ({"root": True, "extraCapabilities": ["CAP_SYS_PTRACE"]}, "extraCapabilities"),
    ({"extraCapabilities": ["SYS_PTRACE"]}, "only with root: true"),
    ({"pin": True}, "only with root: true"),
    ({"root": True, "pin": "/sys/fs/bpf"}, "pin"),
    ({"seccompProfile": {"type": None}}, "seccompProfile"),
    ({"seccompProfile": {"type": "unconfined"}}, "seccompProfile"),
    ({"resources": {"memory": "1Gi"}}, "resources"),
    ({"resources": {"limits": {"memory": "1 GB"}}}, "memory"),
    ({"tolerations": {"operator": "Exists"}}, "tolerations"),
    ({"tolerations": [{"operator": "Exist"}]}, "tolerations"),
    ({"tolerations": [{"effects": "NoSchedule"}]}, "tolerations"),
    ({"nodeSelector": {"a": 1}}, "nodeSelector"),
    ({"affinity": {"node": {}}}, "affinity"),
    ({"priorityClassName": 1000}, "priorityClassName"),
    ({"maxUnavailable": 0}, "maxUnavailable"),
    ({"maxUnavailable": "ten"}, "maxUnavailable"),
    ({"podAnnotations": {"a": True}}, "podAnnotations"),
    ({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
    ({"podLabels": {"a": 1}}, "podLabels"),
    ({"podMonitor": True}, "podMonitor"),
    ({"podMonitor": {"enable": True}}, "enable"),
    ({"podMonitor": {"enabled": "true"}}, "enabled"),
    ({"podMonitor": {"labels": {"a": 1}}}, "labels"),
    ({"podMonitor": {"interval": 30}}, "interval"),
    ({"podMonitor": {"scrapeTimeout": "soon"}}, "scrapeTimeout"),
    ({"podMonitor": {"scheme": "ftp"}}, "scheme"),
    ({"podMonitor": {"tlsConfig": True}}, "tlsConfig"),
    ({"podMonitor": {"basicAuth": "a:b"}}, "basicAuth"),
    ({"podMonitor": {"relabelings": {}}}, "relabelings"),
    ({"podMonitor": {"metricRelabelings": ["drop"]}}, "metricRelabelings"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: json.dumps(value))
def test_values_that_are_refused(helm: Path, values: dict[str, object], words: str) -> None:
    done = template(helm, values)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert words in done.stderr


def test_each_value_is_refused_where_its_type_is_wrong() -> None:
    """No key of values.yaml is without a test of what is refused."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    tested = [refused for refused, _ in REFUSED]
    assert {key for refused in tested for key in refused} >= set(values)
    for name in ("image", "webConfig", "podMonitor"):
        given = [refused[name] for refused in tested if isinstance(refused.get(name), dict)]
        assert {key for each in given if isinstance(each, dict) for key in each} >= set(
            values[name]
        )
