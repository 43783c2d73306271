"""The trials are the paper's rows, with the paper's recipe."""

import dataclasses
import itertools
import json
import re

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training import images as pictures
from tests.training.reproduce import torch_recipe
from training import networks, plans, recipes
from training.reproduce import rows

#: Table to what it has of the published ones, its recipe, and the number of its rows, counted in
#: the paper.
PUBLISHED = {
    "table1": ("1", "paper", 11),
    "table2": ("2", "paper", 10),
    "table3": ("3", "paper", 12),
    "table4": ("4", "batch64", 1),
    "first_paper": ("6 of 1512.03385", "paper", 5),
    "eighth1": ("1", "eighth", 11),
    "eighth2": ("2", "eighth", 10),
    "digits1": ("1", "small", 11),
    "digits2": ("2", "small", 10),
}
ALL = [trial for table in rows.TABLES.values() for trial in (row.trial for row in table.rows)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_row_is_there(name):
    of, recipe, count = PUBLISHED[name]
    table = rows.TABLES[name]
    assert [row.published for row in table.rows] == list(kp.published.results(table=of))
    assert len(table.rows) == count
    assert bool(table.shortened) == name.startswith(("digits", "eighth"))
    on_digits = name.startswith("digits")
    for row in table.rows:
        trial = row.trial
        assert trial.recipe == recipe
        assert trial.dataset == ("digits" if on_digits else row.published.dataset)
        assert row.published.row in row.label
        assert row.published.network in row.label
    assert len({row.label for row in table.rows}) == count


def test_no_table_of_cifar_is_missing():
    published = {row.table for row in kp.published.RESULTS if row.dataset != "imagenet"}
    assert published == {of for of, _, _ in PUBLISHED.values()}
    assert set(rows.TABLES) == {*PUBLISHED, "deep"}


def test_ten_thousand_layers():
    """Nothing is published for them; a registered network is trained as the small tables
    are.
    """
    table = rows.TABLES["deep"]
    assert not table.published
    with pytest.raises(ValueError, match=r"Nothing is published for ResNet-10001"):
        table.rows[0].published  # noqa: B018
    [config, of_table2] = [
        rows.TRIALS[f"digits/resnet{depth}-full_preactivation"].config(0) for depth in (10_001, 110)
    ]
    same = {"model": None, "steps_per_epoch": 0}
    assert dataclasses.replace(config, **same) == dataclasses.replace(of_table2, **same)
    assert config.model.width_factor == of_table2.model.width_factor
    assert config.model.name in kp.list_models()


def test_a_name_is_a_network_with_its_recipe():
    for one, other in itertools.combinations(ALL, 2):
        alike = (one.dataset, one.model, one.recipe) == (other.dataset, other.model, other.recipe)
        assert (one.name == other.name) == alike, (one, other)
    assert set(rows.TRIALS) == {trial.name for trial in ALL}
    # of 39 rows: the original ResNet-110 stands in four tables, ResNet-164 and both with full
    # pre-activation in two
    names = {trial.name for trial in ALL if trial.dataset.startswith("cifar")}
    eighth = {name for name in names if name.endswith("-eighth")}
    assert len(names - eighth) == 39 - 3 - 1 - 2
    assert len(eighth) == 21 - 1


def test_names_are_paths():
    for name in rows.TRIALS:
        dataset, _, file = name.partition("/")
        assert dataset in ("cifar10", "cifar100", "digits")
        assert file
        assert not set(file) - set("abcdefghijklmnopqrstuvwxyz0123456789_-.")
        assert len(name) < 100


def assert_rates(config, plan, recipe):
    """Compare the rate of every iteration with the closed form."""
    got = plans.learning_rate(config, plan)(keras.ops.arange(plan.iterations))
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(got), torch_recipe.paper_rates(recipe), rtol=1e-6
    )


def test_the_recipe_of_the_paper():
    """From its appendix: batch 128, 64k iterations, 0.01 for 400 of them, 0.1, divided
    by 10 at 32k and 48k.
    """
    for trial in ALL:
        if trial.recipe != "paper":
            continue
        config = trial.config(0, dtype="mixed_bfloat16")
        plan = plans.plan(config, 50_000)
        assert (config.batch_size, plan.iterations) == (128, 64_000)
        assert (config.data.name, config.data.augmentation, config.data.padding) == (
            trial.dataset,
            "pad_crop_flip",
            "mean",
        )
        assert (
            config.optimizer.momentum,
            config.optimizer.weight_decay,
            config.optimizer.nesterov,
        ) == (0.9, 1e-4, False)
        assert config.model.dtype == "mixed_bfloat16"
        assert (
            config.optimizer.ema,
            config.optimizer.clip_norm,
            config.optimizer.label_smoothing,
        ) == (None, None, 0)
    assert_rates(config, plan, "cifar10")
    assert config.schedule == recipes.cifar10().schedule


def test_the_recipe_of_table_4():
    (row,) = rows.TABLES["table4"].rows
    config = row.trial.config(0)
    plan = plans.plan(config, 50_000)
    assert (config.batch_size, plan.iterations, config.optimizer.nesterov) == (64, 200 * 781, True)
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.9, 1e-4)
    assert_rates(config, plan, "cifar10_batch64")


def test_an_eighth_of_the_recipe():
    """The paper's in everything but its length, and the parts of it in proportion."""
    config = rows.TABLES["eighth2"].rows[0].trial.config(0)
    paper = rows.TABLES["table2"].rows[0].trial.config(0)
    assert dataclasses.replace(config, schedule=None, steps_per_epoch=0) == dataclasses.replace(
        paper, schedule=None, steps_per_epoch=0
    )
    plan = plans.plan(config, 50_000)
    assert (plan.iterations, plan.iterations / plan.steps_per_epoch) == (8_000, 64)
    rate = plans.rate_at(plans.learning_rate(config, plan))
    steps = {0: 0.01, 49: 0.01, 50: 0.1, 3_999: 0.1, 4_000: 0.01, 6_000: 0.001, 7_999: 0.001}
    assert {step: round(rate(step), 6) for step in steps} == steps


def test_the_recipe_in_small():
    config = rows.TABLES["digits1"].rows[0].trial.config(0)
    plan = plans.plan(config, 1_437)
    assert (config.batch_size, plan.iterations, config.data.name, config.data.augmentation) == (
        32,
        700,
        "digits",
        "none",
    )
    rate = plans.rate_at(plans.learning_rate(config, plan))
    steps = {0: 0.01, 34: 0.01, 35: 0.1, 349: 0.1, 350: 0.01, 524: 0.01, 525: 0.001, 699: 0.001}
    assert {step: round(rate(step), 6) for step in steps} == steps


def test_figures_are_of_rows():
    expected = {"figure1": 2, "figure3": 2, "figure6": 2, "eighth": 2, "deep": 1}
    for name, figure in rows.FIGURES.items():
        for found in figure.trials().values():
            assert len(found) == len({trial.name for trial in found}) == expected[name]
            assert all(rows.TRIALS[trial.name] is not None for trial in found)


def built(trial, **options):
    """Return the network of a trial as the trainer makes it."""
    pixels = np.zeros((4, *((8, 8, 1) if trial.dataset == "digits" else (32, 32, 3))), "uint8")
    data = pictures.in_memory(pixels, classes=100 if trial.dataset == "cifar100" else 10)
    config = trial.config(0)
    model = dataclasses.replace(config.model, **options)
    return networks.build(dataclasses.replace(config, model=model), data, pixels.shape[1])


def plain_config(network):
    """Return the configuration without names, which Keras numbers."""
    config = network.get_config() | {"name": "", "mean": None, "std": None}
    return re.sub(r'"name": "\w+"', "", json.dumps(config, default=str, sort_keys=True))


#: Networks that are built in each run of the tests: the small ResNet-110s have all options.
FAST = {"cifar10/resnet20-original", "cifar10/resnet110-full_preactivation"} | {
    trial.name for trial in ALL if trial.name.startswith("digits/resnet110")
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.trial.name,
            marks=[pytest.mark.soak] * (row.trial.name not in FAST),
        )
        for row in {
            row.trial.name: row
            for table in rows.TABLES.values()
            if table.published
            for row in table.rows
        }.values()
    ],
)
def test_networks_are_the_published_ones(row):
    """The options of --model give what the builder gives, and its number of parameters
    is the published one.
    """
    ours = built(row.trial, stacked=True)
    small = row.trial.dataset == "digits"
    more = {"width_factor": 0.25, "input_shape": (8, 8, 1)} if small else {}
    theirs = getattr(kp.models, row.published.builder)(
        **row.published.arguments,
        **more,
        stacked=True,
        data_format="channels_last",
        dtype="float32",
        mean=0.0,
        std=1.0,
    )
    assert plain_config(ours) == plain_config(theirs)
    counts = kp.published.PARAMETER_COUNTS.get(row.published.network)
    plain = set(row.published.arguments) == {"depth", "arrangement"}
    if counts and plain and row.published.row == "full_preactivation" and not small:
        assert sum(weight.value.shape.num_elements() for weight in ours.trainable_weights) == (
            counts.trainable
        )
