"""The files for containers: a cluster accepts them, and the servers understand them."""

import re

import kubernetes_validate
import pytest
import yaml

from keras_preact.export.tf_serving import write_config
from keras_preact.serving.__main__ import END_SECONDS
from keras_preact.serving.__main__ import settings as server_settings
from keras_preact.serving.app import create_app
from keras_preact.serving.settings import TOKEN_VARIABLE, Settings
from tests.training.commands import ROOT

DEPLOY = ROOT / "keras_preact" / "serving" / "deploy"
#: Seconds from SIGTERM until the project's server is gone, whatever happens.
LONGEST_END = Settings.drain_seconds + END_SECONDS
SERVERS = {"tf-serving": {"grpc": 8500, "http": 8501}, "keras-preact": {"http": 8501}}


def manifests(server):
    return list(yaml.safe_load_all((DEPLOY / f"kubernetes-{server}.yaml").read_text()))


def container_of(server):
    [container] = manifests(server)[0]["spec"]["template"]["spec"]["containers"]
    return container


def compose(server):
    return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"][server]


def arguments(words):
    """Return the value of each option of a command line; None for one without a value."""
    options = [word[2:].split("=", 1) for word in words if word.startswith("--")]
    return {option[0]: option[1] if len(option) > 1 else None for option in options}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_every_document_is_valid(server, version):
    for document in manifests(server):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("server", SERVERS)
def test_ports(server):
    ports, container = SERVERS[server], container_of(server)
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    service = next(one for one in manifests(server) if one["kind"] == "Service")["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    given = arguments(container["args"])
    names = {"grpc": "port", "http": "rest_api_port"} if "grpc" in ports else {"http": "port"}
    assert {name: int(given[option]) for name, option in names.items()} == ports
    published = [port.split(":") for port in compose(server)["ports"]]
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    assert {int(inside) for _, _, inside in published} == set(ports.values())


@pytest.mark.parametrize(
    "words", [container_of("tf-serving")["args"], compose("tf-serving")["command"]]
)
def test_tf_serving_reads_the_files_that_are_written(words, tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "saved_model.pb").touch()
    written = {f"/models/{path.name}" for path in write_config(tmp_path)}
    given = arguments(words)
    assert {value for value in given.values() if value and value.startswith("/")} == written
    assert given["model_config_file"] == "/models/models.config"


def test_the_projects_server_understands_its_command_lines(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    for words in (container_of("keras-preact")["args"], compose("keras-preact")["command"]):
        assert words[0] == "/models"
        words = [word.replace("=/token/", f"={tmp_path}/") for word in words]
        told = server_settings([str(tmp_path), *words[1:]])
        assert (told.host, told.port, told.threads, told.token) == ("0.0.0.0", 8501, 4, "secret")


def test_probes_ask_what_answers_and_the_server_has_time_to_end(tmp_path):
    paths = {getattr(route, "path", None) for route in create_app(Settings(tmp_path)).routes}
    container, service = container_of("keras-preact"), compose("keras-preact")
    probes = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness")
    }
    assert probes == {"readiness": "/v2/health/ready", "liveness": "/v2/health/live"}
    [checked] = re.findall(r'http://127\.0\.0\.1:8501(/[^"]+)"', service["healthcheck"]["test"][-1])
    assert {checked, *probes.values()} <= paths
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    pod = manifests("keras-preact")[0]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + LONGEST_END + 5
    assert float(service["stop_grace_period"].removesuffix("s")) >= LONGEST_END + 5
