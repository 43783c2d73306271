"""The published numbers, written here once more, and what follows from them."""

import json

import pytest

import keras_preact as kp
from keras_preact import published
from tests.keras_preact import harness

MEDIAN, FAIL = "median of 5", None

# Label, error. ResNet-110, original arrangement.
TABLE_1 = [
    ("identity (1, 1)", 6.61),
    ("constant scaling (0, 1)", FAIL),
    ("constant scaling (0.5, 1)", FAIL),
    ("constant scaling (0.5, 0.5)", 12.35),
    ("exclusive gating (1-g(x), g(x)), b_g = 0 to -5", FAIL),
    ("exclusive gating (1-g(x), g(x)), b_g = -6", 8.70),
    ("exclusive gating (1-g(x), g(x)), b_g = -7", 9.81),
    ("shortcut-only gating (1-g(x), 1), b_g = 0", 12.86),
    ("shortcut-only gating (1-g(x), 1), b_g = -6", 6.91),
    ("1x1 convolution (1x1 conv, 1)", 12.22),
    ("dropout (dropout 0.5, 1)", FAIL),
]
# Label, error of ResNet-110, error of ResNet-164.
TABLE_2 = [
    ("original", 6.61, 5.93),
    ("bn_after_addition", 8.17, 6.50),
    ("relu_before_addition", 7.84, 6.14),
    ("relu_only_preactivation", 6.71, 5.91),
    ("full_preactivation", 6.37, 5.46),
]
# Label, data set, network, error, mean, std.
TABLE_3 = [
    ("original", "cifar10", "ResNet-110, 1-layer skip", 9.90, None, None),
    ("full_preactivation", "cifar10", "ResNet-110, 1-layer skip", 8.91, None, None),
    ("original", "cifar10", "ResNet-110", 6.61, None, None),
    ("full_preactivation", "cifar10", "ResNet-110", 6.37, None, None),
    ("original", "cifar10", "ResNet-164", 5.93, None, None),
    ("full_preactivation", "cifar10", "ResNet-164", 5.46, None, None),
    ("original", "cifar10", "ResNet-1001", 7.61, None, None),
    ("full_preactivation", "cifar10", "ResNet-1001", 4.92, 4.89, 0.14),
    ("original", "cifar100", "ResNet-164", 25.16, None, None),
    ("full_preactivation", "cifar100", "ResNet-164", 24.33, None, None),
    ("original", "cifar100", "ResNet-1001", 27.82, None, None),
    ("full_preactivation", "cifar100", "ResNet-1001", 22.71, 22.68, 0.22),
]
# Label, network, top-1 error, top-5 error, remark.
TABLE_5 = [
    ("original, tested at 224", "ResNet-152", 23.0, 6.7, "trained at 224"),
    ("original, tested at 320", "ResNet-152", 21.3, 5.5, "trained at 224"),
    ("full_preactivation, tested at 320", "ResNet-152", 21.1, 5.5, "trained at 224"),
    ("original, tested at 320", "ResNet-200", 21.8, 6.0, "trained at 224"),
    ("full_preactivation, tested at 320", "ResNet-200", 20.7, 5.3, "trained at 224"),
    (
        "full_preactivation, tested at 320",
        "ResNet-200",
        20.1,
        4.8,
        "trained at 224; trained with scale and aspect-ratio augmentation",
    ),
]


def fields(rows, *names):
    return [tuple(getattr(row, name) for name in names) for row in rows]


def test_table_1_shortcuts():
    rows = kp.published.results(table="1")
    assert fields(rows, "row", "error") == TABLE_1
    assert {row.network for row in rows} == {"ResNet-110"}
    assert {row.arguments["depth"] for row in rows} == {110}
    assert {row.arguments["arrangement"] for row in rows} == {"original"}


def test_table_1_arguments_hold_the_factors_and_biases():
    def units_shortcut(row):
        options = {key: value for key, value in row.arguments.items() if key != "depth"}
        return kp.shortcuts.get(harness.unit_of(16, **options).get_config()["shortcut"])

    rows = {row.row: units_shortcut(row) for row in kp.published.results(table="1")}
    for factors in ((0.5, 1.0), (0.5, 0.5)):
        scaling = rows[f"constant scaling ({factors[0]:g}, {factors[1]:g})"]
        assert (scaling.shortcut, scaling.residual) == factors
    assert isinstance(rows["identity (1, 1)"], kp.shortcuts.Identity)
    assert isinstance(rows["constant scaling (0, 1)"], kp.shortcuts.NoShortcut)
    assert isinstance(rows["1x1 convolution (1x1 conv, 1)"], kp.shortcuts.Conv1x1)
    assert rows["dropout (dropout 0.5, 1)"].rate == 0.5
    for label, shortcut in rows.items():
        if "b_g" in label:
            kind = (
                kp.shortcuts.ExclusiveGating
                if label.startswith("exclusive")
                else kp.shortcuts.ShortcutOnlyGating
            )
            assert isinstance(shortcut, kind)
            assert shortcut.bias == float(label.split("b_g = ")[1].split(" to ")[0])


def test_table_2_arrangements():
    for i, network in enumerate(("ResNet-110", "ResNet-164"), 1):
        rows = kp.published.results(table="2", network=network)
        assert fields(rows, "row", "error") == [(row[0], row[i]) for row in TABLE_2]
        for row in rows:
            assert row.network == f"ResNet-{row.arguments['depth']}"
            assert row.row == row.arguments["arrangement"]


def test_table_3_preactivation_gains():
    rows = kp.published.results(table="3")
    assert fields(rows, "row", "dataset", "network", "error", "mean", "std") == TABLE_3
    for row in rows:
        assert row.arguments.get("classes", 10) == {"cifar10": 10, "cifar100": 100}[row.dataset]
        assert row.arguments["arrangement"] == row.row
        assert row.network.startswith(f"ResNet-{row.arguments['depth']}")


def test_the_layout_of_one_layer_skips_is_marked_as_unconfirmed():
    rows = [row for row in published.RESULTS if row.arguments.get("block") == "single"]
    assert {row.network for row in rows} == {"ResNet-110, 1-layer skip"}
    assert all(row.remark.startswith("unconfirmed") for row in rows)


def test_table_4_batch_64():
    [row] = kp.published.results(table="4")
    assert (row.network, row.dataset) == ("ResNet-1001", "cifar10")
    assert (row.error, row.mean, row.std) == (4.62, 4.69, 0.20)
    assert row.remark == "batch 64, 200 epochs, drops at epochs 81 and 122, Nesterov"


def test_table_5_imagenet():
    rows = kp.published.results(table="5")
    assert fields(rows, "row", "network", "error", "top5", "remark") == TABLE_5
    assert {(row.dataset, row.builder) for row in rows} == {("imagenet", "resnet_imagenet")}


def test_first_paper():
    rows = kp.published.results(table="6 of 1512.03385")
    expected = [(20, 8.75), (32, 7.51), (44, 7.17), (56, 6.97), (110, 6.43)]
    assert [(row.arguments["depth"], row.error) for row in rows] == expected
    assert {row.arguments["arrangement"] for row in rows} == {"original"}
    assert rows[-1].statistic == "best of 5"


def test_every_row_has_its_source_and_statistic():
    for row in published.RESULTS:
        number = row.table.split()[0]
        paper = "1512.03385" if "1512" in row.table else "1603.05027"
        assert row.source in (f"arXiv {paper}, Table {number}", f"arXiv {paper}, Tables 3 and 4")
        assert (row.statistic == MEDIAN) == (row.table in ("1", "2", "3", "4"))
        assert row.error is None or 0 < row.error < 30


def test_one_net_has_one_median():
    """A network in several tables has the same number in each."""
    medians: dict = {}
    rows = [row for row in published.RESULTS if row.statistic == MEDIAN and row.table != "4"]
    for row in rows:
        network = row.dataset, json.dumps(dict(row.arguments), sort_keys=True)
        assert medians.setdefault(network, row.error) == row.error
    assert len(rows) - len(medians) >= 5  # some are in several tables


def small(arguments):
    """Return `arguments` with the fewest units of the same kind, and narrow ones."""
    depth = {110: 8, 164: 11, 1001: 11, 152: (1, 1, 1, 1), 200: (1, 1, 1, 1)}.get(
        arguments["depth"], 8
    )
    return {**arguments, "depth": 5 if "block" in arguments else depth, "width_factor": 0.25}


@pytest.mark.parametrize(
    ("builder", "arguments"),
    sorted({(row.builder, json.dumps(small(row.arguments))) for row in published.RESULTS}),
)
def test_arguments_build_a_network(builder, arguments):
    arguments = json.loads(arguments)
    options = {"input_shape": (32, 32, 3), "kernel_initializer": "zeros"}  # fast
    model = getattr(kp.models, builder)(**arguments, **options)
    classes = arguments.get("classes", 1000 if builder == "resnet_imagenet" else 10)
    assert model.output_shape == (None, classes)
    block = arguments.get("block", "basic" if arguments["depth"] == 8 else "bottleneck")
    assert {unit.options.block.name for unit in model.units} == {block}


def test_results_are_filtered_and_keep_their_order():
    assert kp.published.results() == published.RESULTS
    rows = kp.published.results(network="ResNet-164", dataset="cifar10")
    assert [row.table for row in rows] == ["2"] * 5 + ["3"] * 2
    assert len(set(published.RESULTS)) == len(published.RESULTS)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"table": "7"}, ("Unknown table", "Received: table='7'")),
        (
            {"network": "ResNet-111"},
            ("Unknown network", "'ResNet-110'", "Received: network='ResNet-111'"),
        ),
        ({"dataset": "cifar"}, ("Unknown dataset", "'cifar10'", "Received: dataset='cifar'")),
    ],
)
def test_unknown_values_name_the_nearest(arguments, parts):
    with pytest.raises(ValueError, match=r"Did you mean|Available") as error:
        kp.published.results(**arguments)
    assert all(part in str(error.value) for part in parts)


def test_rows_cannot_be_changed():
    row = published.RESULTS[0]
    with pytest.raises(AttributeError):
        row.error = 0.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        row.arguments["depth"] = 20


def test_markdown():
    fail, gain = kp.published.results(table="1")[1], kp.published.results(table="4")[0]
    assert kp.published.to_markdown([fail, gain]).split("\n") == [
        "| table | data | network | row | error % | remark |",
        "|---|---|---|---|---|---|",
        "| 1 | cifar10 | ResNet-110 | constant scaling (0, 1) | fail (> 20) | plain net |",
        "| 4 | cifar10 | ResNet-1001 | full_preactivation, batch 64 | 4.62 (4.69 +- 0.20) | "
        "batch 64, 200 epochs, drops at epochs 81 and 122, Nesterov |",
    ]
    assert kp.published.to_markdown("4") == kp.published.to_markdown(
        kp.published.results(table="4")
    )
    with pytest.raises(ValueError, match=r"Unknown table.*'Table 4'"):
        kp.published.to_markdown("Table 4")
    assert "| 9.90 |" in kp.published.to_markdown(kp.published.results(table="3"))
    assert "| 23.0 / 6.7 |" in kp.published.to_markdown(kp.published.results(table="5"))
