"""The recipes: the paper's numbers as literals, and how options change them."""

import dataclasses
import re

import pytest

import keras_preact as kp
from tests.own_modules import working_in
from tests.training.calls import error_of
from training.config import Config, Data, Model
from training.data.pipelines import AUGMENTATIONS
from training.data.sources import SOURCES
from training.directory import runs
from training.recipes import RECIPES
from training.run import plans

#: Appendix of arXiv 1603.05027. All weights are decayed.
PAPER_OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-4,
    "exclude_from_decay": (),
    "scaling": "none",
    "reference_batch_size": 256,
    "clip_norm": None,
    "ema": None,
    "label_smoothing": 0.0,
    "layer_decay": None,
    "adam_ratio": 0.1,  # only Muon uses it
}


def test_help_describes_each_recipe_in_one_line():
    for recipe, make in RECIPES.items():
        first = make.__doc__.strip().partition("\n\n")[0]
        assert "\n" not in first, recipe


@pytest.mark.parametrize(
    ("recipe", "model", "data", "batch"),
    [
        ("cifar10", "cifar_resnet20_preact", "cifar10", 128),
        ("cifar10_batch64", "cifar_resnet1001_preact", "cifar10", 64),
        ("cifar100", "cifar_resnet164_preact", "cifar100", 128),
        ("imagenet", "imagenet_resnet50_preact", "imagenet2012", 256),
    ],
)
def test_recipe_is_the_papers(recipe, model, data, batch):
    config = RECIPES[recipe]()
    assert config.model == Model(model)  # nothing overridden
    assert config.batch_size == batch
    nesterov = {"nesterov": recipe == "cifar10_batch64"}
    assert dataclasses.asdict(config.optimizer) == PAPER_OPTIMIZER | nesterov
    # all images are trained on, as for the paper's final numbers; the padding is the mean, because
    # the released code pads normalised images
    if recipe == "imagenet":
        assert config.data == Data(data, augmentation="resized_crop_flip", size=224)
    else:
        assert config.data == Data(data, augmentation="pad_crop_flip", padding="mean", border=4)
    assert (config.data.holdout, config.data.watch_test) == (0, False)


@pytest.mark.parametrize(
    ("recipe", "steps_per_epoch", "rates"),
    [
        ("cifar10", 391, {400: 0.01, 32_000: 0.1, 48_000: 0.01, 64_000: 0.001}),
        ("cifar100", 391, {400: 0.01, 32_000: 0.1, 48_000: 0.01, 64_000: 0.001}),
        ("cifar10_batch64", 781, {400: 0.01, 81 * 781: 0.1, 122 * 781: 0.01, 200 * 781: 0.001}),
        # 1,281,167 images in batches of 256: 5,005 iterations an epoch
        ("imagenet", 5005, {30 * 5005: 0.1, 60 * 5005: 0.01, 90 * 5005: 0.001}),
    ],
)
def test_learning_rate_over_the_papers_runs(recipe, steps_per_epoch, rates):
    """`rates` has the rate of each phase by the iteration after the phase's last one."""
    config = RECIPES[recipe]()
    plan = plans.plan(config, steps_per_epoch * config.batch_size)
    assert plan.iterations == max(rates)
    schedule = plans.learning_rate(config, plan)
    begin = 0
    for end, rate in rates.items():
        for step in (begin, end - 1):
            assert float(schedule(step)) == pytest.approx(rate, rel=1e-5), step
        begin = end


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_together(received, name):
    config = RECIPES[name]()
    assert received(name) == config
    # finetune has a network from a file
    assert (config.model.name in kp.list_models()) != (name == "finetune")
    assert config.data.name in SOURCES
    assert config.data.augmentation in AUGMENTATIONS
    # recipes for a user's images hold out some of them
    own = config.data.name in ("digits", "folder")
    assert config.data.holdout == (0.1 if own else 0)


OWN = '''
import dataclasses
from training.config import Config


def small():
    """A recipe of mine."""
    return Config(batch_size=7)


def wrong():
    return Config(batch_size="7")


def nothing():
    return None


def depth(layers):
    return Config()


value = 3


def fails():
    raise ValueError("a bug of the user")
'''


@pytest.fixture
def own(tmp_path):
    with working_in(tmp_path, own_recipes=OWN):
        yield tmp_path


def test_a_recipe_of_a_person(own, received, capsys):
    assert received("own_recipes:small", "--seed", "3") == Config(batch_size=7, seed=3)
    with pytest.raises(SystemExit):
        received("own_recipes:small", "--help")
    assert "A recipe of mine." in capsys.readouterr().out
    path = runs.default_directory("own_recipes:small")
    assert re.fullmatch(r"runs/own_recipes-small-2\d{7}-\d{6}", str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_recipes:large", "RECIPE must be MODULE:NAME, such as my_recipes:small"),
        ("other_recipes:small", "No module named 'other_recipes'"),
        ("own_recipes:wrong", "The option batch_size cannot be '7'"),
        ("own_recipes:nothing", "must return a Config. Received: None"),
        ("own_recipes:depth", "must be a function without arguments: missing"),
        ("own_recipes:value", "must be a function without arguments"),
        ("small", "Unknown recipe of train: 'small'. Did you mean 'folder_small'"),
    ],
)
def test_recipes_that_are_none(name, message, own, received, capsys):
    assert message in error_of(capsys, received, name)


def test_a_fault_in_a_recipe_shows_its_trace(own, received):
    with pytest.raises(RuntimeError, match="own_recipes:fails raised ValueError: a bug"):
        received("own_recipes:fails")
