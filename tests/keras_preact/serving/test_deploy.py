"""The files for containers: a cluster accepts them, and the servers understand them."""

import re

import kubernetes_validate
import pytest
import yaml
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from keras_preact.export import _warmup
from keras_preact.serving.__main__ import END_SECONDS
from keras_preact.serving.__main__ import settings as server_settings
from keras_preact.serving.app import create_app
from keras_preact.serving.settings import TOKEN_VARIABLE, Settings
from tests.training.calls import ROOT

DEPLOY = ROOT / "keras_preact" / "serving" / "deploy"
#: Seconds from SIGTERM until the project's server is gone, whatever happens.
LONGEST_END = Settings.drain_seconds + END_SECONDS
PROBES = ("startup", "readiness", "liveness")
PORTS = {"grpc": 8500, "http": 8501}
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes-tf-serving.yaml").read_text()))
[CONTAINER] = MANIFESTS[0]["spec"]["template"]["spec"]["containers"]
KSERVE = yaml.safe_load((DEPLOY / "kserve-keras-preact.yaml").read_text())
#: What KServe makes of it: its own fields beside those of a pod are the numbers of pods.
KSERVE_POD = {
    name: value for name, value in KSERVE["spec"]["predictor"].items() if "Replicas" not in name
}


def compose(server):
    return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"][server]


def arguments(words):
    """Return the value of each option of a command line; None for one without a value."""
    options = [word[2:].split("=", 1) for word in words if word.startswith("--")]
    return {option[0]: option[1] if len(option) > 1 else None for option in options}


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_every_document_is_valid(version):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": KSERVE["metadata"], "spec": KSERVE_POD}
    for document in (*MANIFESTS, pod):
        kubernetes_validate.validate(document, version, strict=True)


def test_ports():
    assert {port["name"]: port["containerPort"] for port in CONTAINER["ports"]} == PORTS
    service = next(one for one in MANIFESTS if one["kind"] == "Service")["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == PORTS
    for server in ("tf-serving", "keras-preact"):
        for port in compose(server)["ports"]:
            address, _, inside = port.split(":")
            assert (address, int(inside) in PORTS.values()) == ("127.0.0.1", True)


def test_kserve_serves_the_folder_of_a_model_with_tf_serving():
    service = yaml.safe_load((DEPLOY / "kserve.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    assert model["modelFormat"] == {"name": "tensorflow"}
    assert model["storageUri"].endswith("/" + service["metadata"]["name"])


def test_nginx_takes_bodies_as_large_as_the_server_does():
    text = (DEPLOY / "nginx.conf").read_text()
    [size] = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(size) * 2**20 == Settings("models").max_body_bytes
    [port] = re.findall(r"server 127\.0\.0\.1:(\d+);", text)
    assert int(port) == Settings("models").port


@pytest.mark.parametrize("words", [CONTAINER["args"], compose("tf-serving")["command"]])
def test_tf_serving_reads_the_files_of_the_page(words):
    """The models are parsed with the server's messages; the batch sizes are those of an export."""
    text = (DEPLOY / "README.md").read_text()
    files = dict(re.findall(r"cat > saved_models/(\S+) <<'END'\n(.*?)END\n", text, re.S))
    given = arguments(words)
    assert [int(given[name]) for name in ("port", "rest_api_port")] == [*PORTS.values()]
    paths = {value for value in given.values() if value and value.startswith("/")}
    assert paths == {f"/models/{name}" for name in files}
    message = model_server_config_pb2.ModelServerConfig()
    parsed = text_format.Parse(files[given["model_config_file"].split("/")[-1]], message)
    for model in parsed.model_config_list.config:
        assert (model.model_platform, model.base_path) == ("tensorflow", f"/models/{model.name}")
    sizes = _warmup.BATCH_SIZES
    assert f"allowed_batch_sizes: {[*sizes]}\n" in files["batching.config"]
    assert f"max_batch_size {{ value: {sizes[-1]} }}\n" in files["batching.config"]


@pytest.mark.parametrize(
    "words", [compose("keras-preact")["command"], KSERVE_POD["containers"][0]["args"]]
)
def test_the_projects_server_understands_its_command_line(words, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert words[0] == "/models"
    told = server_settings([str(tmp_path), *words[1:]])
    assert (told.host, told.port, told.threads, told.token) == ("0.0.0.0", 8501, 4, "secret")


def test_the_probes_ask_what_answers_and_the_server_has_time_to_end(tmp_path):
    paths = {getattr(route, "path", None) for route in create_app(Settings(tmp_path)).routes}
    service, [container] = compose("keras-preact"), KSERVE_POD["containers"]
    checked = re.findall(r'http://127\.0\.0\.1:8501(/[^"]+)"', service["healthcheck"]["test"][-1])
    checked += [container[f"{probe}Probe"]["httpGet"]["path"] for probe in PROBES]
    assert len(checked) == 4
    assert paths.issuperset(checked)
    assert float(service["stop_grace_period"].removesuffix("s")) >= LONGEST_END + 5
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert KSERVE_POD["terminationGracePeriodSeconds"] >= waits + LONGEST_END + 5


def test_kserve_reaches_the_projects_server_which_may_write_to_tmp_only():
    [container] = KSERVE_POD["containers"]
    assert container["name"] == "kserve-container"  # KServe's name for the one that it serves
    [port] = container["ports"]
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in PROBES} == {port["name"]}
    given = arguments(container["args"])
    assert given["port"] == str(port["containerPort"])
    assert given["threads"] == str(container["resources"]["limits"]["cpu"])
    assert KSERVE_POD["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/models": True, "/tmp": False}
