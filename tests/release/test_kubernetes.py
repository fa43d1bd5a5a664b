"""The manifest of docs/how-to/kubernetes.md: what Kubernetes' schemas say of it, and whether it fits the image."""

import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from bough_server.settings import Settings
from tests.clients.cli_process import bough
from tests.docs import pages
from tests.release import dockerfile
from tests.release.workflows import ROOT
from tests.support.toolchains import skip_or_fail

PAGE: Final = "docs/how-to/kubernetes.md"
OLDEST: Final = "1.30"
"""The oldest version that the page names."""


@cache
def _text() -> str:
    blocks = pages.blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"))
    (text,) = (block.text for block in blocks if block.kind == "yaml")
    return text


def _manifest() -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all(_text())}


def _container(kind: str) -> dict[str, Any]:
    (found,) = _manifest()[kind]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_kubernetes_knows_every_field_of_the_manifest(version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        skip_or_fail("kubernetes", ["kubernetes-validate (the extra `cluster`)"])
    kubernetes: Any = importlib.import_module("kubernetes_validate")
    asked = kubernetes.latest_version() if version == "newest" else version
    kinds = _manifest()
    for found in kinds.values():
        kubernetes.validate(found, asked, strict=True)
    assert list(kinds) == ["Job", "Deployment", "Service", "PodDisruptionBudget"]
    kinds["Deployment"]["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(kinds["Deployment"], asked, strict=True)


def test_its_selectors_find_its_pods_and_its_ports_their_servers() -> None:
    kinds = _manifest()
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    (exposed,) = (rest for name, rest in dockerfile.instructions((ROOT / "Dockerfile").read_text()) if name == "EXPOSE")
    server, (port,) = _container("Deployment"), kinds["Service"]["spec"]["ports"]
    assert server["ports"] == [{"name": port["targetPort"], "containerPort": int(exposed)}]
    assert (server["readinessProbe"]["grpc"]["port"], port["port"]) == (int(exposed), int(exposed))


def test_a_pod_has_time_to_drain() -> None:
    pod = _manifest()["Deployment"]["spec"]["template"]["spec"]
    sleep = _container("Deployment")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > sleep + Settings().server.drain_grace + 5


def test_job_and_servers_are_of_one_image_and_one_database() -> None:
    job, server = _container("Job"), _container("Deployment")
    same = ("image", "securityContext")
    assert [job[name] for name in same] == [server[name] for name in same]
    assert [each for each in server["env"] if each["name"] != "BOUGH_KEYS_FILE"] == job["env"]


def test_the_file_of_keys_is_where_the_server_looks_for_it() -> None:
    server = _container("Deployment")
    (path,) = (each["value"] for each in server["env"] if each["name"] == "BOUGH_KEYS_FILE")
    volumes = {each["name"]: each for each in _manifest()["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    (mounted,) = (each for each in server["volumeMounts"] if path.startswith(each["mountPath"] + "/"))
    assert "secret" in volumes[mounted["name"]]


async def test_its_commands_are_those_of_the_program(tmp_path: Path) -> None:
    for kind in ("Job", "Deployment"):
        options = {word for word in _container(kind)["args"] if word.startswith("--")}
        words = [word for word in _container(kind)["args"] if re.fullmatch("[a-z]+", word)]
        asked = await bough(*words, "--help")
        assert asked.code == 0, asked
        assert [option for option in options if option not in asked.out] == []
