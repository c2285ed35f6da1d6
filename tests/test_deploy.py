"""Container and unit files: small, without root and torch, and with options that the command has."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from recap_ctr.cli.main import app
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.counters import HELP
from recap_ctr.serve.openapi import OPEN_PATHS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def options() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {
        name
        for parameter in command.commands["serve"].params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def test_image_runs_without_root_and_says_whether_it_is_well() -> None:
    lines = instructions()
    last_stage = lines[max(at for at, (word, _) in enumerate(lines) if word == "FROM") :]
    users = [argument for word, argument in last_stage if word == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert any(word == "HEALTHCHECK" and "/health/ready" in argument for word, argument in last_stage)
    assert [word for word, _ in last_stage].index("USER") < [word for word, _ in last_stage].index(
        "ENTRYPOINT"
    )
    for word, argument in lines:
        if word == "COPY" and "--from" not in argument:
            for name in argument.split()[:-1]:
                assert (ROOT / name).exists(), name
        assert word != "ADD" and "curl" not in argument


def test_image_has_no_training_stack() -> None:
    extras = re.findall(r"'\.\[(.*?)\]'", (DEPLOY / "Dockerfile").read_text())
    assert extras == ["serve"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    assert not [name for name in installed if re.match(r"(torch|recap-ctr\[train)", name)]


def test_options_exist() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    unit = re.search(r"^ExecStart=(.*)$", (DEPLOY / "recap.service").read_text(), re.MULTILINE)
    default = next(argument for word, argument in instructions() if word == "CMD")
    assert unit
    for words in (composed["services"]["recap"]["command"], shlex.split(unit[1]), yaml.safe_load(default)):
        assert {word for word in words if word.startswith("--")} <= options()


def test_compose_names_what_is_there_and_keeps_to_this_machine() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    recap = composed["services"]["recap"]
    assert (
        DEPLOY / recap["build"]["context"] / recap["build"]["dockerfile"]
    ).resolve() == DEPLOY / "Dockerfile"
    for service in composed["services"].values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
        assert set(service.get("secrets", [])) <= set(composed["secrets"])
    assert recap["read_only"] is True and "/tmp" in recap["tmpfs"]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["recap:8000"]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/token"


def test_a_new_version_is_seen_from_inside() -> None:
    """A mount of the artifact itself would stay with the directory that a new one has replaced."""
    recap = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["recap"]
    default = yaml.safe_load(next(argument for word, argument in instructions() if word == "CMD"))
    mounted = [Path(volume.rsplit(":", 2)[1]) for volume in recap["volumes"]]
    for command in (recap["command"], default):
        assert Path(command[0]).parent in mounted


def test_unit_is_bounded_and_reloads() -> None:
    text = (DEPLOY / "recap.service").read_text()
    for setting in (
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ExecReload=/bin/kill -HUP $MAINPID",
    ):
        assert setting in text
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]


def test_kubernetes_probes_and_options_exist() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {word for word in container["args"] if word.startswith("--")} <= options()
    assert (
        container["readinessProbe"]["httpGet"]["path"]
        == container["startupProbe"]["httpGet"]["path"]
        == "/health/ready"
    )
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert {"/health/ready", "/health/live"} <= set(OPEN_PATHS), "probes carry no token"
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert pod["terminationGracePeriodSeconds"] > ServeConfig(artifact="").grace_seconds
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) and all(
        panel["description"] for panel in panels
    )
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    metrics = {name for expression in expressions for name in re.findall(r"recap_[a-z_]+", expression)}
    known = {*HELP, *(f"{name}_bucket" for name, (kind, _) in HELP.items() if kind == "histogram")}
    assert metrics <= known and len(metrics) >= 10
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "no panel hides another"
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource"]
