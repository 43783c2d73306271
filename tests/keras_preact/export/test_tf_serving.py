"""TensorFlow Serving's configuration, parsed as the server parses it: with its
messages, from protobuf's text format.
"""

import json

import pytest
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_preact.export import tf_serving
from keras_preact.export.tf_serving import write_config

FILES = ["batching.config", "monitoring.config", "models.config"]

#: Messages that tensorflow-serving-api leaves out, by TensorFlow Serving's
#: session_bundle_config.proto and monitoring_config.proto: name, number, label (1 optional, 3
#: repeated), type (3 int64, 8 bool, 9 string, 11 message).
INT64 = ".google.protobuf.Int64Value"
MESSAGES = {
    "BatchingParameters": [
        ("max_batch_size", 1, 1, 11, INT64),
        ("batch_timeout_micros", 2, 1, 11, INT64),
        ("max_enqueued_batches", 3, 1, 11, INT64),
        ("num_batch_threads", 4, 1, 11, INT64),
        ("thread_pool_name", 5, 1, 11, ".google.protobuf.StringValue"),
        ("allowed_batch_sizes", 6, 3, 3, None),
        ("pad_variable_length_inputs", 7, 1, 8, None),
    ],
    "PrometheusConfig": [("enable", 1, 1, 8, None), ("path", 2, 1, 9, None)],
    "MonitoringConfig": [("prometheus_config", 1, 1, 11, ".tensorflow.serving.PrometheusConfig")],
}


def message(name):
    """Return an empty message of a kind that stands in MESSAGES."""
    file = descriptor_pb2.FileDescriptorProto(
        name="serving.proto", package="tensorflow.serving", syntax="proto3"
    )
    file.dependency.append(wrappers_pb2.DESCRIPTOR.name)
    for kind, fields in MESSAGES.items():
        entry = file.message_type.add(name=kind)
        for field, number, label, type_, type_name in fields:
            entry.field.add(name=field, number=number, label=label, type=type_, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"tensorflow.serving.{name}")
    )()


def models(directory):
    from tensorflow_serving.config import model_server_config_pb2

    text = (directory / "models.config").read_text()
    return list(
        text_format.Parse(
            text, model_server_config_pb2.ModelServerConfig()
        ).model_config_list.config
    )


def batching(directory):
    """Return the allowed sizes, and what else is set."""
    parsed = text_format.Parse(
        (directory / "batching.config").read_text(), message("BatchingParameters")
    )
    values = {field.name: value for field, value in parsed.ListFields()}
    return list(values.pop("allowed_batch_sizes")), {
        name: value.value for name, value in values.items()
    }


@pytest.fixture
def directory(tmp_path):
    """A directory of models, with things in it that are none."""
    for name, sizes in {"b/2": [1, 2, 64], "b/10": [1, 3, 8], "a/1": [4], "empty/1": None}.items():
        version = tmp_path / name
        (version / "assets.extra").mkdir(parents=True)
        if sizes:
            (version / "saved_model.pb").touch()
            (version / "assets.extra" / "model_card.json").write_text(
                json.dumps({"batch_sizes": sizes})
            )
    (tmp_path / ".export-x" / "1").mkdir(parents=True)
    (tmp_path / ".export-x" / "1" / "saved_model.pb").touch()
    (tmp_path / "README.md").touch()
    return tmp_path


def test_the_three_files(directory):
    before = set(directory.iterdir())
    paths = write_config(directory)
    assert paths == [directory / name for name in FILES]
    assert set(directory.iterdir()) - before == set(paths)
    first, second = models(directory)
    assert [(first.name, first.base_path), (second.name, second.base_path)] == [
        ("a", "/models/a"),
        ("b", "/models/b"),
    ]
    for model in (first, second):
        assert model.model_platform == "tensorflow"
        assert model.model_version_policy.latest.num_versions == 1
        assert {field.name for field, _ in model.ListFields()} == {
            "name",
            "base_path",
            "model_platform",
            "model_version_policy",
        }
    # version 10 of b, not 2: versions are numbers
    others = {"batch_timeout_micros": 0, "max_enqueued_batches": 10, "num_batch_threads": 4}
    assert batching(directory) == ([1, 3, 4, 8], {"max_batch_size": 8} | others)
    monitoring = text_format.Parse(
        (directory / "monitoring.config").read_text(), message("MonitoringConfig")
    )
    assert monitoring.prometheus_config.enable
    assert monitoring.prometheus_config.path == "/monitoring/prometheus/metrics"


@pytest.mark.parametrize(("versions", "policy"), [(2, "latest"), (None, "all")])
def test_command(directory, capsys, versions, policy):
    options = {
        "--versions": versions or "all",
        "--base-path": "gs://bucket/m/",
        "--batch-timeout-micros": 500,
        "--max-enqueued-batches": 7,
        "--num-batch-threads": 3,
    }
    tf_serving.main([str(directory), *(str(part) for pair in options.items() for part in pair)])
    assert capsys.readouterr().out.splitlines() == [f"{directory}/{name}" for name in FILES]
    for model in models(directory):
        assert model.base_path == f"gs://bucket/m/{model.name}"
        assert model.model_version_policy.WhichOneof("policy_choice") == policy
        assert model.model_version_policy.latest.num_versions == (versions or 0)
    sizes, values = batching(directory)
    assert sizes == [1, 2, 3, 4, 8, 64]
    others = {"batch_timeout_micros": 500, "max_enqueued_batches": 7, "num_batch_threads": 3}
    assert values == {"max_batch_size": 64} | others


@pytest.mark.parametrize("card", [None, "{}"])
def test_models_without_batch_sizes(tmp_path, card):
    version = tmp_path / "m" / "1"
    (version / "assets.extra").mkdir(parents=True)
    (version / "saved_model.pb").touch()
    if card:
        (version / "assets.extra" / "model_card.json").write_text(card)
    write_config(tmp_path)
    sizes, values = batching(tmp_path)
    assert sizes == [1, 2, 4, 8, 16, 32]
    assert values["max_batch_size"] == 32


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=30
)


@given(
    names=st.sets(NAMES.filter(lambda name: not name.startswith(".")), min_size=1, max_size=4),
    base=NAMES,
)
@settings(max_examples=50, deadline=None)
def test_any_name_is_told_as_it_is(tmp_path_factory, names, base):
    directory = tmp_path_factory.mktemp("models")
    for name in names:
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "saved_model.pb").touch()
    write_config(directory, base_path="/" + base)
    assert {model.name: model.base_path for model in models(directory)} == {
        name: f"/{base}/{name}" for name in names
    }
    assert (directory / "models.config").read_bytes().isascii()


def test_written_again(directory):
    """The same models give the same files, and others take their place."""
    write_config(directory)
    first = {name: (directory / name).read_bytes() for name in FILES}
    write_config(directory)
    assert {name: (directory / name).read_bytes() for name in FILES} == first
    (directory / "a" / "1" / "saved_model.pb").unlink()
    write_config(directory)
    assert [model.name for model in models(directory)] == ["b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"versions": 0}, "`versions` must be a positive integer. Received: versions=0"),
        ({"max_enqueued_batches": 0}, "Received: max_enqueued_batches=0"),
        ({"num_batch_threads": 1.5}, "Received: num_batch_threads=1.5"),
        (
            {"batch_timeout_micros": -1},
            "must be an integer, 0 or more. Received: batch_timeout_micros=-1",
        ),
        (
            {"base_path": "models"},
            "must be an absolute path such as /models, or an address. Received: base_path='models'",
        ),
    ],
)
def test_arguments_that_cannot_work(directory, options, message):
    with pytest.raises(ValueError, match=message):
        write_config(directory, **options)
    assert not any((directory / name).exists() for name in FILES)


@pytest.mark.parametrize("card", ["{", "[]", '{"batch_sizes": 3}', '{"batch_sizes": ["3"]}'])
def test_cards_that_are_none(directory, card):
    path = directory / "a" / "1" / "assets.extra" / "model_card.json"
    path.write_text(card)
    with pytest.raises(ValueError, match=r"a/1/assets\.extra/model_card\.json is no model card"):
        write_config(directory)
    assert not any((directory / name).exists() for name in FILES)


@pytest.mark.parametrize("name", [".", "missing", "README.md"])
def test_no_models(tmp_path, name):
    (tmp_path / "README.md").touch()
    with pytest.raises(
        ValueError, match=r"There must be a model, NAME/VERSION/saved_model\.pb, in `directory`"
    ):
        write_config(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_model_in_place_of_its_folder(directory):
    with pytest.raises(
        ValueError, match=f"It looks like one model; its folder of models would be {directory}"
    ):
        write_config(directory / "a")


def test_a_failure_leaves_the_files_as_they_were(directory):
    write_config(directory)
    before = {name: (directory / name).read_bytes() for name in FILES}
    (directory / "batching.config").unlink()
    (directory / "batching.config").mkdir()  # which no file can replace
    with pytest.raises(OSError, match="directory"):
        write_config(directory, versions=2)
    for name in FILES[1:]:
        assert (directory / name).read_bytes() == before[name]
    assert not list(directory.glob(".export-[!x]*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "error: There must be a model"),
        (["missing", "--versions", "none"], "argument --versions: invalid"),
        ([], "the following arguments are required: directory"),
    ],
)
def test_mistakes_on_the_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        tf_serving.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
