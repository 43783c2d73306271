"""TensorFlow Serving's configuration. Its models are parsed with the server's messages."""

import json

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_preact.export import tf_serving
from keras_preact.export.tf_serving import write_config

FILES = ["batching.config", "monitoring.config", "models.config"]
#: In the fields of TensorFlow Serving's session_bundle_config.proto.
BATCHING = """\
max_batch_size {{ value: {} }}
batch_timeout_micros {{ value: {} }}
max_enqueued_batches {{ value: {} }}
num_batch_threads {{ value: {} }}
"""


def models(directory):
    from tensorflow_serving.config import model_server_config_pb2

    message = model_server_config_pb2.ModelServerConfig()
    text = (directory / "models.config").read_text()
    return list(text_format.Parse(text, message).model_config_list.config)


def batching(*sizes, timeout=0, batches=10, threads=4):
    allowed = "".join(f"allowed_batch_sizes: {size}\n" for size in sizes)
    return BATCHING.format(sizes[-1], timeout, batches, threads) + allowed


def add(directory, name, card=None):
    """Add an export's files, as far as they are read."""
    version = directory / name
    (version / "assets.extra").mkdir(parents=True)
    (version / "saved_model.pb").touch()
    if card is not None:
        (version / "assets.extra" / "model_card.json").write_text(card)


@pytest.fixture
def directory(tmp_path):
    """A directory of models, with things in it that are none."""
    for name, sizes in {"b/2": [1, 2, 64], "b/10": [1, 3, 8], "a/1": [4]}.items():
        add(tmp_path, name, json.dumps({"batch_sizes": sizes}))
    add(tmp_path, ".export-x/1")
    (tmp_path / "empty" / "1").mkdir(parents=True)
    (tmp_path / "README.md").touch()
    return tmp_path


def test_the_three_files(directory):
    before = set(directory.iterdir())
    paths = write_config(directory)
    assert paths == [directory / name for name in FILES]
    assert set(directory.iterdir()) - before == set(paths)
    for model, name in zip(models(directory), "ab", strict=True):
        assert (model.name, model.base_path) == (name, f"/models/{name}")
        assert model.model_platform == "tensorflow"
        assert model.model_version_policy.latest.num_versions == 1
        assert len(model.ListFields()) == 4
    # version 10 of b, not 2: versions are numbers
    assert paths[0].read_text() == batching(1, 3, 4, 8)
    assert paths[1].read_text() == (
        'prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }\n'
    )
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_config(directory)] == first
    (directory / "a" / "1" / "saved_model.pb").unlink()
    write_config(directory)
    assert [model.name for model in models(directory)] == ["b"]


@pytest.mark.parametrize(("versions", "policy"), [("2", "latest"), ("all", "all")])
def test_command(directory, capsys, versions, policy):
    options = {"versions": versions, "base-path": "gs://bucket/m/", "batch-timeout-micros": 500}
    options |= {"max-enqueued-batches": 7, "num-batch-threads": 3}
    tf_serving.main([str(directory), *(f"--{name}={value}" for name, value in options.items())])
    assert capsys.readouterr().out.splitlines() == [f"{directory}/{name}" for name in FILES]
    for model in models(directory):
        assert model.base_path == f"gs://bucket/m/{model.name}"
        assert model.model_version_policy.WhichOneof("policy_choice") == policy
        assert str(model.model_version_policy.latest.num_versions or "all") == versions
    written = (directory / "batching.config").read_text()
    assert written == batching(1, 2, 3, 4, 8, 64, timeout=500, batches=7, threads=3)


@pytest.mark.parametrize("card", [None, "{}"])
def test_models_without_batch_sizes(tmp_path, card):
    add(tmp_path, "m/1", card)
    write_config(tmp_path)
    assert (tmp_path / "batching.config").read_text() == batching(1, 2, 4, 8, 16, 32)


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=30
)


@given(
    names=st.sets(NAMES.filter(lambda name: not name.startswith(".")), min_size=1, max_size=4),
    base=NAMES,
)
@settings(max_examples=30)
def test_any_name_is_told_as_it_is(tmp_path_factory, names, base):
    directory = tmp_path_factory.mktemp("models")
    for name in names:
        add(directory, f"{name}/1")
    write_config(directory, base_path="/" + base)
    assert {model.name: model.base_path for model in models(directory)} == {
        name: f"/{base}/{name}" for name in names
    }
    assert (directory / "models.config").read_bytes().isascii()


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        (".", {"versions": 0}, "versions=0"),
        (".", {"max_enqueued_batches": 0}, "max_enqueued_batches=0"),
        (".", {"num_batch_threads": 1.5}, "num_batch_threads=1.5"),
        (".", {"batch_timeout_micros": -1}, "batch_timeout_micros=-1"),
        (".", {"base_path": "models"}, "absolute path"),
        ("empty", {}, "There must be a model"),
        ("README.md", {}, "There must be a model"),
        ("a", {}, "looks like one model"),
    ],
)
def test_wrong_arguments(directory, folder, options, message):
    with pytest.raises(ValueError, match=message):
        write_config(directory / folder, **options)
    assert not [path for name in FILES for path in directory.rglob(name)]


@pytest.mark.parametrize("card", ["{", "[]", '{"batch_sizes": 3}', '{"batch_sizes": ["3"]}'])
def test_cards_that_are_none(tmp_path, card):
    add(tmp_path, "a/1", card)
    with pytest.raises(ValueError, match=r"a/1/assets\.extra/model_card\.json is no model card"):
        write_config(tmp_path)
    assert not (tmp_path / FILES[0]).exists()


def test_a_failure_leaves_the_files_as_they_were(directory):
    write_config(directory)
    before = [(directory / name).read_bytes() for name in FILES[1:]]
    (directory / FILES[0]).unlink()
    (directory / FILES[0]).mkdir()  # which no file can replace
    with pytest.raises(OSError, match="directory"):
        write_config(directory, versions=2)
    assert [(directory / name).read_bytes() for name in FILES[1:]] == before


def test_mistakes_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as end:
        tf_serving.main(["missing"])
    assert end.value.code == 2
    assert "error: There must be a model" in capsys.readouterr().err
