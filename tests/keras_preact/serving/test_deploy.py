"""The files for containers: what a cluster would refuse, and where they disagree with
each other or with the servers.
"""

import dataclasses
import re
import shlex
import tomllib

import kubernetes_validate
import pytest
import yaml
from prometheus_client import generate_latest

from keras_preact.export.tf_serving import METRICS_PATH, write_config
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


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The documents of a manifest, by kind."""

    name: str
    kinds: dict

    @property
    def pod(self):
        return self.kinds["Deployment"]["spec"]["template"]

    @property
    def container(self):
        [container] = self.pod["spec"]["containers"]
        return container


@pytest.fixture(params=SERVERS)
def cluster(request):
    return Cluster(
        request.param, {document["kind"]: document for document in manifests(request.param)}
    )


def compose(server):
    return yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"][server]


def arguments(words):
    """Return what stands behind each option of a command line; None behind one without
    a value.
    """
    options = [word[2:].split("=", 1) for word in words if word.startswith("--")]
    return {option[0]: option[1] if len(option) > 1 else None for option in options}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_every_document_is_valid(server, version):
    documents = manifests(server)
    assert [one["kind"] for one in documents] == [
        "Deployment",
        "Service",
        "HorizontalPodAutoscaler",
        "PodDisruptionBudget",
        "NetworkPolicy",
    ]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_documents_mean_the_same_pods(cluster):
    labels = {"app": cluster.name}
    assert {document["metadata"]["name"] for document in cluster.kinds.values()} == {cluster.name}
    assert cluster.pod["metadata"]["labels"] == labels
    assert cluster.kinds["Deployment"]["spec"]["selector"] == {"matchLabels": labels}
    assert cluster.kinds["Service"]["spec"]["selector"] == labels
    assert cluster.kinds["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": labels}
    assert cluster.kinds["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": labels}
    [spread] = cluster.pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": labels}
    target = cluster.kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": cluster.name}
    # two masters of the number of pods would undo each other's work
    assert "replicas" not in cluster.kinds["Deployment"]["spec"]


def test_ports(cluster):
    ports = SERVERS[cluster.name]
    assert {port["name"]: port["containerPort"] for port in cluster.container["ports"]} == ports
    service = cluster.kinds["Service"]["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert cluster.pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    given = arguments(cluster.container["args"])
    names = {"grpc": "port", "http": "rest_api_port"} if "grpc" in ports else {"http": "port"}
    assert {name: int(given[option]) for name, option in names.items()} == ports


def test_volumes(cluster):
    volumes = {volume["name"]: volume for volume in cluster.pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount for mount in cluster.container["volumeMounts"]}
    token = {"token"} if cluster.name == "keras-preact" else set()
    assert volumes.keys() == mounts.keys() == {"models", "tmp"} | token
    assert volumes["tmp"]["emptyDir"]["sizeLimit"]
    assert all("size=" in folder for folder in compose(cluster.name)["tmpfs"])
    assert volumes["models"]["persistentVolumeClaim"] == {
        "claimName": "saved-models",
        "readOnly": True,
    }
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}


def test_probes_ask_what_answers(cluster, tmp_path):
    app = create_app(Settings(tmp_path))
    open_paths = {
        "keras-preact": {route.path for route in app.routes if hasattr(route, "path")},
        "tf-serving": {METRICS_PATH},
    }
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = cluster.container[name]
        handler = probe.get("httpGet") or probe["tcpSocket"]
        assert handler["port"] in SERVERS[cluster.name]
        if "httpGet" in probe:
            assert handler["path"] in open_paths[cluster.name]
    assert cluster.pod["metadata"]["annotations"]["prometheus.io/path"] in open_paths[cluster.name]
    # a server that is alive but not ready must not be killed
    assert cluster.container["livenessProbe"].get("httpGet", {}).get("path") != "/v2/health/ready"
    if cluster.name == "keras-preact":
        assert cluster.container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"


def test_no_request_is_lost_when_pods_are_replaced(cluster):
    assert cluster.kinds["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }
    assert cluster.kinds["HorizontalPodAutoscaler"]["spec"]["minReplicas"] >= 2
    assert cluster.kinds["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    program, seconds = cluster.container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    end = LONGEST_END if cluster.name == "keras-preact" else 0
    assert cluster.pod["spec"]["terminationGracePeriodSeconds"] >= int(seconds) + end + 5


def test_nothing_runs_as_root(cluster):
    assert cluster.pod["spec"]["automountServiceAccountToken"] is False
    security = cluster.pod["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] > 0
    assert cluster.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    service = compose(cluster.name)
    assert service["user"] == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_as_many_threads_as_cores(cluster):
    resources = cluster.container["resources"]
    option = {"tf-serving": "tensorflow_intra_op_parallelism", "keras-preact": "threads"}[
        cluster.name
    ]
    assert resources["limits"].keys() == resources["requests"].keys() == {"cpu", "memory"}
    assert int(arguments(cluster.container["args"])[option]) == resources["limits"]["cpu"]
    service = compose(cluster.name)
    assert int(arguments(service["command"])[option]) == service["cpus"]
    assert service["mem_limit"]


def test_autoscalers_count_what_the_adapter_gives(cluster, tmp_path):
    by_type = {
        metric["type"]: metric
        for metric in cluster.kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert by_type.keys() == {"Resource", "Pods"}
    assert by_type["Resource"]["resource"]["name"] == "cpu"
    name = by_type["Pods"]["pods"]["metric"]["name"]
    rules = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    [rule] = [rule for rule in rules if rule["name"]["as"] == name]
    assert rule["resources"]["overrides"] == {
        kind: {"resource": kind} for kind in ("namespace", "pod")
    }
    [series] = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    if cluster.name == "tf-serving":
        # /tensorflow/serving/request_count, as its exporter writes it; a counter, of which the rate
        # is asked
        assert series == ":tensorflow:serving:request_count"
        assert "rate(<<.Series>>{<<.LabelMatchers>>}[2m])" in rule["metricsQuery"]
    else:
        metrics = generate_latest(create_app(Settings(tmp_path)).state.metrics.registry).decode()
        assert f"# TYPE {series} gauge" in metrics
    readme = (DEPLOY / "README.md").read_text()
    aim = by_type["Pods"]["pods"]["target"]
    assert aim["type"] == "AverageValue"
    [line] = [line for line in readme.splitlines() if line.startswith(f"| `{name}` |")]
    assert line.endswith(f"| {aim['averageValue']} a pod |")


def tf_serving_commands():
    [container] = manifests("tf-serving")[0]["spec"]["template"]["spec"]["containers"]
    service = compose("tf-serving")
    assert container["image"] == service["image"]
    assert container["command"] == service["entrypoint"] == ["tensorflow_model_server"]
    return {"kubernetes": container["args"], "compose": service["command"]}


@pytest.mark.parametrize("where", ["kubernetes", "compose"])
def test_tf_serving_reads_the_files_that_are_written(where, tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "saved_model.pb").touch()
    written = {f"/models/{path.name}" for path in write_config(tmp_path)}
    given = arguments(tf_serving_commands()[where])
    assert {value for value in given.values() if value and value.startswith("/")} == written
    assert given["model_config_file"] == "/models/models.config"
    assert given["batching_parameters_file"] == "/models/batching.config"
    assert given["monitoring_config_file"] == "/models/monitoring.config"
    assert "enable_batching" in given
    assert 'base_path: "/models/m"' in (tmp_path / "models.config").read_text()


def test_the_projects_server_understands_its_command_lines(tmp_path, monkeypatch):
    [container] = manifests("keras-preact")[0]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    service = compose("keras-preact")
    assert service["environment"] == [TOKEN_VARIABLE]
    assert "env" not in container
    for words in (container["args"], service["command"]):
        assert words[0] == "/models"
        words = [word.replace("=/token/", f"={tmp_path}/") for word in words]
        told = server_settings([str(tmp_path), *words[1:]])
        assert (told.host, told.port, told.threads, told.token) == ("0.0.0.0", 8501, 4, "secret")
        assert told.open_metrics == (service["command"] != words)
    # the token is not in the manifest, but a file of a Secret
    file = arguments(container["args"])["token-file"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "token"]
    [volume] = [
        one
        for one in manifests("keras-preact")[0]["spec"]["template"]["spec"]["volumes"]
        if one["name"] == "token"
    ]
    key = file.removeprefix(f"{mount['mountPath']}/")
    command = (
        f"kubectl create secret generic {volume['secret']['secretName']} --from-literal={key}="
    )
    assert command in (DEPLOY / "README.md").read_text()


def test_the_network_policy_opens_the_servers_ports(cluster):
    policy = cluster.kinds["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    [rule] = policy["ingress"]
    assert {one["port"] for one in rule["ports"]} == SERVERS[cluster.name].keys()


def test_the_context_of_the_image_is_what_it_copies():
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert kept == {name for words in copied for name in words.split()}
    assert lines[1] == "*"


@pytest.mark.parametrize("server", SERVERS)
def test_compose(server):
    service = compose(server)
    [volume] = service["volumes"]
    assert (volume["type"], volume["target"], volume["read_only"]) == ("bind", "/models", True)
    default = re.fullmatch(r"\$\{SAVED_MODELS:-(.+)\}", volume["source"])[1]
    assert (DEPLOY / default).resolve() == ROOT / "saved_models"
    published = [port.split(":") for port in service["ports"]]
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    assert {int(inside) for _, _, inside in published} == set(SERVERS[server].values())
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert "8501" in service["healthcheck"]["test"][-1]


def test_both_can_run_on_one_machine():
    published = [port.rsplit(":", 1)[0] for server in SERVERS for port in compose(server)["ports"]]
    assert len(set(published)) == len(published)


def test_the_health_check_of_the_projects_server(tmp_path):
    service = compose("keras-preact")
    *_, code = service["healthcheck"]["test"]
    compile(code, "healthcheck", "exec")
    [path] = re.findall(r'http://127\.0\.0\.1:8501(/[^"]+)"', code)
    assert path in {getattr(route, "path", None) for route in create_app(Settings(tmp_path)).routes}
    assert float(service["stop_grace_period"].removesuffix("s")) >= LONGEST_END + 5


def test_the_dockerfile_names_what_exists(tmp_path):
    build = compose("keras-preact")["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
    instructions = [
        line.split(maxsplit=1)
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line[:1] not in "#"
    ]
    copied = [word for name, text in instructions if name == "COPY" for word in text.split()[:-1]]
    for path in copied:
        assert (ROOT / path).exists(), path
    # what setuptools reads besides the package
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "keras_preact", project["readme"], *project["license-files"]} <= set(
        copied
    )
    [install] = [shlex.split(text) for name, text in instructions if name == "RUN"]
    assert install[install.index("-c") + 1] in copied
    extras = re.fullmatch(r"\.\[([\w,]+)\]", install[-1])[1].split(",")
    assert project["optional-dependencies"].keys() >= set(extras) == {"serving", "openvino"}
    [user] = [text for name, text in instructions if name == "USER"]
    assert user == compose("keras-preact")["user"]
    words = {
        name: yaml.safe_load(text) for name, text in instructions if name in ("ENTRYPOINT", "CMD")
    }
    assert words["ENTRYPOINT"] == ["python", "-m", "keras_preact.serving"]
    assert words["CMD"][0] == "/models"
    assert server_settings([str(tmp_path), *words["CMD"][1:]]).host == "0.0.0.0"


def test_the_readme_names_what_exists():
    readme = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"keras_preact/serving/deploy/([\w.-]+\w)", readme)) | set(
        re.findall(r"^\| [^|]+ \| `(.+?)` ", readme, re.M)
    )
    assert named == {path.name for path in DEPLOY.iterdir()} - {"README.md"}
