"""The published rows build networks, and agree with one another."""

import copy
import dataclasses
import json
import pickle
import re

import pytest

import keras_preact as kp
from keras_preact import published
from tests.keras_preact import harness

RESULTS = published.RESULTS


def test_tables():
    """A few numbers of each table of the papers, typed a second time."""
    errors = {
        table: [row.error for row in published.results(table=table)]
        for table in dict.fromkeys(row.table for row in RESULTS)
    }
    assert errors["1"] == [6.61, None, None, 12.35, None, 8.70, 9.81, 12.86, 6.91, 12.22, None]
    assert errors["2"][:2] + errors["2"][-2:] == [6.61, 5.93, 6.37, 5.46]
    assert errors["3"][:2] + errors["3"][-4:] == [9.90, 8.91, 25.16, 24.33, 27.82, 22.71]
    assert errors["4"] == [4.62]
    assert errors["5"] == [23.0, 21.3, 21.1, 21.8, 20.7, 20.1]
    assert errors["6 of 1512.03385"] == [8.75, 7.51, 7.17, 6.97, 6.43]


def test_labels_fit_arguments():
    for row in RESULTS:
        assert row.network.startswith(f"ResNet-{row.arguments['depth']}")
        assert row.arguments.get("classes", 10) == (100 if row.dataset == "cifar100" else 10)
        if "b_g" in row.row:
            assert row.arguments["gate_bias"] == float(re.search(r"b_g = (-?\d+)", row.row)[1])


def small(arguments):
    """Return `arguments` with the fewest units of the same kind, and narrow ones."""
    depth = {110: 8, 164: 11, 1001: 11, 152: (1, 1, 1, 1), 200: (1, 1, 1, 1)}.get(
        arguments["depth"], 8
    )
    return {**arguments, "depth": 5 if "block" in arguments else depth, "width_factor": 0.25}


@pytest.mark.parametrize(
    ("builder", "arguments"),
    sorted({(row.builder, json.dumps(small(row.arguments))) for row in RESULTS}),
)
def test_arguments_build_a_network(builder, arguments):
    arguments = json.loads(arguments)
    options = {"input_shape": (32, 32, 3), "kernel_initializer": "zeros"}  # fast
    model = getattr(kp.models, builder)(**arguments, **options)
    classes = arguments.get("classes", 1000 if builder == "resnet_imagenet" else 10)
    assert model.output_shape == (None, classes)
    block = arguments.get("block", "basic" if arguments["depth"] == 8 else "bottleneck")
    assert {unit.block.name for unit in model.copy_units()} == {block}


def test_look_ups():
    rows = published.results(network="ResNet-164", dataset="cifar10")
    assert [row.table for row in rows] == ["2"] * 5 + ["3"] * 2
    assert "Unknown table" in harness.error_of(lambda: published.results(table="7"))
    assert "'ResNet-110'" in harness.error_of(lambda: published.results(network="ResNet-111"))


def test_markdown():
    fail, gain = published.results(table="1")[1], published.results(table="4")[0]
    lines = published.to_markdown([fail, gain]).split("\n")
    assert lines[2] == (
        "| 1 | cifar10 | ResNet-110 | constant scaling (0, 1) | fail (> 20) | plain net |"
    )
    assert "| 4.62 (4.69 +- 0.20) |" in lines[3]
    assert "| 23.0 / 6.7 |" in published.to_markdown("5")


@pytest.mark.parametrize(
    "record", [RESULTS[0], kp.model_entry("cifar_resnet20_preact")], ids=lambda r: type(r).__name__
)
def test_records_can_be_copied_and_not_changed(record):
    for made in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert made == record
    # what pandas.DataFrame(records) needs
    assert dataclasses.asdict(record)["arguments"] == dict(record.arguments)
    with pytest.raises(TypeError, match="item assignment"):
        record.arguments["depth"] = 8
