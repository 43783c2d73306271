"""The trials are the paper's rows, with the paper's recipe."""

import dataclasses
import json
import re

import numpy as np
import pytest

import keras_preact as kp
from keras_preact import shortcuts
from tests.training import images as pictures
from training.reproduce import rows
from training.run import networks, parts, plans

#: Name of a table to the published table, its recipe, and the number of its rows, counted in the
#: paper.
PUBLISHED = {
    **{"table1": ("1", "paper", 11), "table2": ("2", "paper", 10), "table3": ("3", "paper", 12)},
    **{"table4": ("4", "batch64", 1), "first_paper": ("6 of 1512.03385", "paper", 5)},
    **{f"eighth{layers}1": ("1", "eighth", 11) for layers in ("", "_20_", "_8_")},
    **{f"eighth{layers}2": ("2", "eighth", 5) for layers in ("", "_20_", "_8_")},
    **{"digits1": ("1", "small", 11), "digits2": ("2", "small", 10)},
}


def test_every_published_row_is_there():
    published = {row.table for row in kp.published.RESULTS if row.dataset != "imagenet"}
    assert published == {of for of, _, _ in PUBLISHED.values()}
    assert set(rows.TABLES) == {
        *PUBLISHED,
        "fast",
        "preact",
        "shortcuts",
        "shortcuts_eighth",
        "advice",
        "deep",
        "plain",
    }
    for name, (of, recipe, count) in PUBLISHED.items():
        table = rows.TABLES[name]
        shallower = {"network": "ResNet-110"} if recipe == "eighth" else {}
        found = [row.published for row in table.rows]
        assert found == list(kp.published.results(table=of, **shallower))
        assert len({row.label for row in table.rows}) == count
        for row in table.rows:
            dataset = "digits" if name.startswith("digits") else row.published.dataset
            assert (row.trial.recipe, row.trial.dataset) == (recipe, dataset)
            depth = row.published.arguments["depth"]
            if shallower:
                depth = int((*re.findall(r"_(\d+)_", name), "56")[0])
            assert f"ResNet-{depth}," in row.label
            assert f"/resnet{depth}-" in row.trial.name
            assert kp.model_entry(row.trial.model.name).arguments["arrangement"] == "original"


def test_preactivation_at_the_depths_of_the_first_paper():
    """They differ from the first paper's rows only in the arrangement."""
    original = {row.trial.name: row.trial for row in rows.TABLES["first_paper"].rows}
    for row, depth in zip(rows.TABLES["preact"].rows, (20, 32, 44, 56), strict=True):
        plain = original[f"cifar10/resnet{depth}-original"]
        assert row.trial.name == f"cifar10/resnet{depth}-full_preactivation"
        model = kp.models.resnet_cifar(depth, arrangement="full_preactivation")
        assert plain_config(kp.create_model(row.trial.model.name)) == plain_config(model)
        assert dataclasses.replace(row.trial, name=plain.name, model=plain.model) == plain


def test_a_name_is_a_network_with_its_recipe():
    found = [row.trial for table in rows.TABLES.values() for row in table.rows]
    assert set(rows.TRIALS) == {trial.name for trial in found}
    alike = {(trial.dataset, str(trial.model), trial.recipe) for trial in found}
    assert len(alike) == len(rows.TRIALS)


def trial(table: str) -> rows.Trial:
    return rows.TABLES[table].rows[0].trial


@pytest.mark.parametrize(
    ("table", "images", "rates"),
    [
        ("eighth2", 50_000, {50: 0.01, 4_000: 0.1, 6_000: 0.01, 8_000: 0.001}),
        ("digits1", 1_437, {35: 0.01, 350: 0.1, 525: 0.01, 700: 0.001}),
        ("deep", 1_437, {35: 0.01, 350: 0.1, 525: 0.01, 700: 0.001}),
    ],
)
def test_shorter_recipes_have_its_parts_in_proportion(table, images, rates):
    """`rates` has the rate of each phase by the iteration after the phase's last one."""
    config = trial(table).config(0)
    plan = plans.plan(config, images)
    assert plan.iterations == max(rates)
    rate, begin = plans.rate_at(plans.learning_rate(config, plan)), 0
    for end, expected in rates.items():
        assert [rate(begin), rate(end - 1)] == pytest.approx([expected] * 2, rel=1e-5)
        begin = end


def plain_config(network):
    """Return the configuration without names, because Keras numbers them."""
    config = network.get_config() | {"name": "", "mean": None, "std": None}
    return re.sub(r'"name": "\w+"', "", json.dumps(config, default=str, sort_keys=True))


#: The small ResNet-110s have all options; deeper networks would test nothing more.
SMALL = {
    row.trial.name: row
    for name in ("digits1", "digits2")
    for row in rows.TABLES[name].rows
    if "resnet110" in row.trial.name
}


@pytest.mark.parametrize("name", SMALL)
def test_networks_are_the_published_ones(name):
    """The options of --model give the same network as the builder."""
    row = SMALL[name]
    data = pictures.in_memory(np.zeros((4, 8, 8, 1), "uint8"), classes=10)
    config = row.trial.config(0)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, stacked=True))
    ours = networks.build(config, data, 8)
    options = {"data_format": "channels_last", "dtype": "float32", "mean": 0.0, "std": 1.0}
    options |= {"width_factor": 0.25, "input_shape": (8, 8, 1), "stacked": True}
    theirs = getattr(kp.models, row.published.builder)(**row.published.arguments, **options)
    assert plain_config(ours) == plain_config(theirs)


@pytest.mark.parametrize("depth", [8, 20, 56])
def test_shallower_networks_differ_from_the_published_ones_in_depth_alone(depth):
    row = rows.TABLES["eighth1" if depth == 56 else f"eighth_{depth}_1"].rows[0]
    data = pictures.in_memory(np.zeros((4, 32, 32, 3), "uint8"), classes=10)
    options = {"data_format": "channels_last", "dtype": "float32", "mean": 0.0, "std": 1.0}
    theirs = kp.models.resnet_cifar(**{**row.published.arguments, "depth": depth}, **options)
    assert plain_config(networks.build(row.trial.config(0), data, 32)) == plain_config(theirs)


#: Row of the table of shortcuts to the shortcut of its networks.
TEN_YEARS = {
    "identity": kp.shortcuts.Identity(),
    "constant scaling (0.5, 0.5)": kp.shortcuts.ConstantScaling(0.5, 0.5),
    "exclusive gating, b_g = -6": kp.shortcuts.ExclusiveGating(-6.0),
    "shortcut-only gating, b_g = -6": kp.shortcuts.ShortcutOnlyGating(-6.0),
    "1x1 convolution": kp.shortcuts.Conv1x1(),
    "dropout 0.5": kp.shortcuts.Dropout(),
    "none": kp.shortcuts.NoShortcut(),
    "scaled residual, 0 (SkipInit, ReZero)": kp.shortcuts.ScaledResidual(0.0),
    "scaled residual, 1e-6 per channel (LayerScale)": kp.shortcuts.ScaledResidual(1e-6, True),
    "orthogonal, over channels": kp.shortcuts.Orthogonal(),
    "orthogonal, over the map": kp.shortcuts.Orthogonal("map"),
    "decayed identity, 1 to 0.6": kp.shortcuts.DecayedIdentity(0.6),
    "depth scaling, power 0.5": kp.shortcuts.DepthScaling(0.5, base=9),
    "hyper-connections, free": kp.shortcuts.HyperConnections(constraint="none"),
    "hyper-connections, Sinkhorn (mHC)": kp.shortcuts.HyperConnections(constraint="sinkhorn"),
    "hyper-connections, permutations (mHC-lite)": kp.shortcuts.HyperConnections(
        constraint="permutations"
    ),
}


@pytest.mark.parametrize("table", ["shortcuts", "shortcuts_eighth"])
def test_shortcuts_of_ten_years(table):
    """Every row of `kp.SHORTCUTS` is there, with the options that its label names."""
    found = {
        row.label: shortcuts.get(
            parts.arguments(row.trial.model)["shortcut"], row.trial.model.gate_bias
        )
        for row in rows.TABLES[table].rows
    }
    assert found == TEN_YEARS
    assert {type(h) for h in found.values()} == {*kp.SHORTCUTS.values()}
