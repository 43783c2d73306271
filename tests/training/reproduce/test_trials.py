"""The trials are the paper's rows, with the paper's recipe."""

import dataclasses
import itertools

import keras
import pytest

import keras_preact as kp
from training import plans, recipes
from training.reproduce import trials
from training.reproduce.run import build
from training.reproduce.smoke import images

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

#: Table to what it has of the published ones, its recipe, and the number of its rows, counted in
#: the paper.
PUBLISHED = {
    "table1": ("1", "paper", 11),
    "table2": ("2", "paper", 10),
    "table3": ("3", "paper", 12),
    "table4": ("4", "batch64", 1),
    "first_paper": ("6 of 1512.03385", "paper", 5),
    "digits1": ("1", "small", 11),
    "digits2": ("2", "small", 10),
}
ALL = [trial for table in trials.TABLES.values() for trial in (row.trial for row in table.rows)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_row_is_there(name):
    of, recipe, count = PUBLISHED[name]
    table = trials.TABLES[name]
    assert [row.published for row in table.rows] == list(kp.published.results(table=of))
    assert len(table.rows) == count
    assert table.small == name.startswith("digits")
    for row in table.rows:
        trial = row.trial
        more = {"width_factor": 0.25} if table.small else {}
        assert dict(trial.arguments) == dict(row.published.arguments) | more
        assert (trial.builder, trial.recipe) == ("resnet_cifar", recipe)
        assert trial.dataset == ("digits" if table.small else row.published.dataset)
        assert row.published.row in row.label
        assert row.published.network in row.label
    assert len({row.label for row in table.rows}) == count


def test_no_table_of_cifar_is_missing():
    published = {row.table for row in kp.published.RESULTS if row.dataset != "imagenet"}
    assert published == {of for of, _, _ in PUBLISHED.values()}
    assert set(trials.TABLES) == set(PUBLISHED)


def test_a_name_is_a_network_with_its_recipe():
    for one, other in itertools.combinations(ALL, 2):
        alike = (one.dataset, dict(one.arguments), one.recipe) == (
            other.dataset,
            dict(other.arguments),
            other.recipe,
        )
        assert (one.name == other.name) == alike, (one, other)
    assert set(trials.TRIALS) == {trial.name for trial in ALL}
    # of 39 rows: the original ResNet-110 stands in four tables, ResNet-164 and both with full
    # pre-activation in two
    assert len({trial.name for trial in ALL if trial.dataset.startswith("cifar")}) == 39 - 3 - 1 - 2


def test_names_are_paths():
    for name in trials.TRIALS:
        dataset, _, file = name.partition("/")
        assert dataset in ("cifar10", "cifar100", "digits")
        assert file
        assert not set(file) - set("abcdefghijklmnopqrstuvwxyz0123456789_-.")
        assert len(name) < 100


def test_the_recipe_of_the_paper():
    """From its appendix: batch 128, 64k iterations, 0.01 for 400 of them, 0.1, divided
    by 10 at 32k and 48k.
    """
    for trial in ALL:
        if trial.recipe != "paper":
            continue
        config = trial.config(dtype="mixed_bfloat16")
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
    rate = plans.rate_at(plans.learning_rate(config, plan))
    steps = {
        0: 0.01,
        399: 0.01,
        400: 0.1,
        31_999: 0.1,
        32_000: 0.01,
        47_999: 0.01,
        48_000: 0.001,
        63_999: 0.001,
    }
    assert {step: round(rate(step), 6) for step in steps} == steps
    assert config.schedule == recipes.cifar10().schedule


def test_the_recipe_of_table_4():
    (row,) = trials.TABLES["table4"].rows
    config = row.trial.config()
    plan = plans.plan(config, 50_000)
    assert (config.batch_size, plan.iterations, config.optimizer.nesterov) == (64, 200 * 781, True)
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.9, 1e-4)
    rate = plans.rate_at(plans.learning_rate(config, plan))
    steps = {
        0: 0.01,
        399: 0.01,
        400: 0.1,
        81 * 781 - 1: 0.1,
        81 * 781: 0.01,
        122 * 781 - 1: 0.01,
        122 * 781: 0.001,
    }
    assert {step: round(rate(step), 6) for step in steps} == steps


def test_the_recipe_in_small():
    config = trials.TABLES["digits1"].rows[0].trial.config()
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
    expected = {"figure1": 2, "figure3": 2, "figure6": 2}
    for name, figure in trials.FIGURES.items():
        for found in figure.trials().values():
            assert len(found) == len({trial.name for trial in found}) == expected[name]
            assert all(trials.TRIALS[trial.name] is not None for trial in found)


COUNTED = {
    "first_paper": [
        (row.published.network, row.trial) for row in trials.TABLES["first_paper"].rows
    ],
    "table2": [
        (row.published.network, row.trial)
        for row in trials.TABLES["table2"].rows
        if row.published.row == "full_preactivation"
    ],
}


@pytest.mark.parametrize(
    ("network", "trial"), [pair for pairs in COUNTED.values() for pair in pairs]
)
def test_networks_have_the_published_number_of_parameters(network, trial):
    built = build(trial, images(trial.dataset), "float32", stacked=True)
    assert sum(weight.value.shape.num_elements() for weight in built.trainable_weights) == (
        kp.published.PARAMETER_COUNTS[network].trainable
    )
    assert built.input_shape == (None, 32, 32, 3)


ROWS = {trial.name: trial for trial in ALL if trial.dataset != "digits"}
SHALLOW = {name: trial for name, trial in ROWS.items() if trial.arguments["depth"] == 110}
DEEP = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ROWS
    if ROWS[name].arguments["depth"] > 110
]


@pytest.mark.parametrize("name", SHALLOW)
def test_every_shortcut_and_arrangement_can_be_built(name):
    trial = SHALLOW[name]
    shallow = dataclasses.replace(trial, arguments={**trial.arguments, "depth": 8})
    built = build(shallow, images(trial.dataset), "mixed_bfloat16")
    assert (built.input_shape, built.output_shape) == ((None, 32, 32, 3), (None, 10))


@pytest.mark.parametrize("name", DEEP)
def test_every_deep_network_can_be_built(name):
    trial = ROWS[name]
    built = build(trial, images(trial.dataset), "mixed_bfloat16", stacked=True)
    assert built.output_shape == (None, 100 if trial.dataset == "cifar100" else 10)
    assert built.count_params() > 1_000_000


def test_small_networks_can_be_built():
    rows = trials.TABLES["digits1"].rows
    assert [build(rows[0].trial, images("digits"), stacked=True).input_shape] == [(None, 8, 8, 1)]
