"""Recipes: functions that return a `Config`. `keras-preact train RECIPE` runs one;
options change its fields. A recipe of a person is MODULE:RECIPE.

Each docstring gives the result: the published number with its source
(`kp.published`), the number that was measured here, or that nothing was measured.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping

from . import functions
from .config import Config, Data, Model, Optimizer, Schedule, from_json
from .errors import UserError, lookup, reading

_CIFAR10 = Data("cifar10", augmentation="pad_crop_flip")


def digits() -> Config:
    """ResNet-20 on 8 x 8 handwritten digits: no download, about a minute on a CPU.

    Expect about 98 % accuracy on the test images. It is not a fair estimate: the weight
    decay was chosen on these images.
    """
    return Config(
        model=Model("digits_resnet20_preact"),
        data=Data("digits", holdout=0.1),
        optimizer=Optimizer(weight_decay=5e-3),
        schedule=Schedule("cosine", length=30, warmup=2),
        batch_size=64,
    )


def cifar10() -> Config:
    """The paper's CIFAR-10 recipe, ResNet-20 by default: 64,000 iterations.

    Each iteration has 128 images. The rate is 0.1, divided by 10 at 32k and 48k
    iterations, after 400 iterations at 0.01. For a deeper network add --model.name
    cifar_resnet110_preact. Published test errors: 8.75 % for the original ResNet-20
    (Table 6 of arXiv 1512.03385), 6.37 % for the pre-activation ResNet-110 and 5.46 %
    for ResNet-164 (Table 2 of arXiv 1603.05027, medians of 5), 4.92 % for ResNet-1001
    (Table 3). results/README.md has the errors that were measured here.
    """
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=_CIFAR10,
        schedule=Schedule(
            "steps", drops=(32_000, 48_000), warmup=400, length=64_000, unit="iterations"
        ),
    )


def cifar10_batch64() -> Config:
    """The paper's recipe for ResNet-1001 with batches of 64: 200 epochs.

    The rate is 0.1, divided by 10 at epochs 81 and 122, with Nesterov momentum. An
    epoch has 781 iterations.
    Published test error: 4.62 %, the median of 5 runs, 4.69 +- 0.20 (Table 4 of arXiv
    1603.05027). Not measured here.
    """
    return Config(
        model=Model("cifar_resnet1001_preact"),
        data=_CIFAR10,
        optimizer=Optimizer(nesterov=True),
        schedule=Schedule(
            "steps",
            drops=(81 * 781, 122 * 781),
            warmup=400,
            length=200 * 781,
            unit="iterations",
        ),
        batch_size=64,
    )


def cifar10_fast() -> Config:
    """A wide, shallow network trained for 12 epochs. Not the paper's recipe.

    It uses Muon for the kernels, a rate that rises and falls linearly, a flip of each
    image in every other epoch and label smoothing, after arXiv 2404.00498 and its later
    records. Add --views flip_shift to `keras-preact evaluate` for the average of 6
    views of an image. results/README.md has its measured accuracy and time.
    """
    return Config(
        model=Model("cifar_fast_resnet8", dtype="auto"),
        data=dataclasses.replace(_CIFAR10, padding="reflect", border=2, flip="alternating"),
        optimizer=Optimizer(
            name="muon",
            learning_rate=0.03,
            momentum=0.6,
            nesterov=True,
            weight_decay=0.1,
            label_smoothing=0.2,
        ),
        schedule=Schedule("linear", length=12, warmup=2),
        batch_size=512,
    )


def cifar10_modern() -> Config:
    """ResNet-110 with cosine, label smoothing and averaged weights: 200 epochs.

    It uses Nesterov momentum and does not decay normalisations. Cosine: arXiv 1608.03983;
    warm-up: arXiv 1706.02677; label smoothing of 0.1: arXiv 1512.00567; the average has
    a momentum of 0.999. No number is published for it, and none was measured.
    """
    return Config(
        model=Model("cifar_resnet110_preact", dtype="auto"),
        data=_CIFAR10,
        optimizer=Optimizer(
            weight_decay=5e-4,
            nesterov=True,
            exclude_from_decay=("norm",),
            ema=0.999,
            label_smoothing=0.1,
        ),
        schedule=Schedule("cosine", length=200, warmup=5),
    )


def cifar100() -> Config:
    """The paper's CIFAR-100 recipe, ResNet-164 by default.

    Published test errors: 24.33 % for ResNet-164, 22.71 % for ResNet-1001 (Table 3 of
    arXiv 1603.05027, medians of 5). Not measured here.
    """
    return Config(
        model=Model("cifar_resnet164_preact"),
        data=Data("cifar100", augmentation="pad_crop_flip"),
        schedule=cifar10().schedule,
    )


def imagenet() -> Config:
    """The paper's ImageNet schedule, ResNet-50 by default: 90 epochs of batches of 256.

    The rate is 0.1, divided by 10 at epochs 30 and 60. The paper has no ResNet-50;
    --model.name imagenet_resnet200_preact is its ResNet-200. Published errors of that
    network, with this augmentation (scale and aspect ratio) and one test crop of 320
    pixels: 20.1 % top-1 and 4.8 % top-5 (Table 5 of arXiv 1603.05027). The paper's other
    rows use scale augmentation only. Not measured here.
    """
    return Config(
        model=Model("imagenet_resnet50_preact"),
        data=Data("imagenet2012", augmentation="resized_crop_flip", size=224),
        schedule=Schedule("steps", drops=(30, 60), length=90),
        batch_size=256,
    )


def folder() -> Config:
    """Your images in --data.dir, as CLASS/IMAGE with --data.test 0.2: ResNet-18.

    Or as train/CLASS/IMAGE and test/CLASS/IMAGE, without --data.test. It is for a GPU:
    images have 224 x 224 pixels. No accuracy was measured with this recipe: it depends on
    the images.
    """
    return Config(
        model=Model("imagenet_resnet18_preact", dtype="auto"),
        data=Data("folder", augmentation="resized_crop_flip", size=224, holdout=0.1),
        schedule=Schedule("cosine", length=50, warmup=5),
        batch_size=32,
    )


def folder_small() -> Config:
    """Your images as for folder, small enough for a CPU: ResNet-20, 64 pixels.

    No accuracy was measured with this recipe: it depends on the images.
    """
    return Config(
        model=Model("cifar_resnet20_preact", dtype="auto"),
        data=Data("folder", augmentation="resized_crop_flip", size=64, holdout=0.1),
        schedule=Schedule("cosine", length=50, warmup=5),
        batch_size=32,
    )


def finetune() -> Config:
    """Fine-tune a trained network (--model.weights RUN or FILE) on your images.

    Images are given as for folder. The network gets a new classifier and trains for 10
    epochs at a tenth of the usual rate. With --model.freeze stage2 the first stages do
    not change, with --optimizer.layer-decay 0.7 they change less. No accuracy was
    measured with this recipe: it depends on the images.
    """
    return Config(
        model=Model(""),
        data=Data("folder", augmentation="resized_crop_flip", holdout=0.1),
        optimizer=Optimizer(learning_rate=0.01, nesterov=True),
        schedule=Schedule("cosine", length=10, warmup=1),
        batch_size=32,
    )


#: Recipes by their name on the command line.
RECIPES: Mapping[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        *(digits, cifar10, cifar10_batch64, cifar10_fast, cifar10_modern),
        *(cifar100, imagenet, folder, folder_small, finetune),
    )
}


def find(name: str) -> Callable[[], Config]:
    """Return the recipe of this name, or a recipe of a person, MODULE:RECIPE: a function
    without arguments that returns a `Config`.

    Raises:
        UserError: if there is none. The recipe of a person raises one if it returns
            something else.
    """
    if not functions.is_own(name):
        return lookup(RECIPES, name, "recipe of train")
    own = functions.find_object(name, "RECIPE", "my_recipes:small")

    @functools.wraps(own)
    def recipe() -> Config:
        try:
            inspect.signature(own).bind()
        except TypeError as error:
            raise UserError(
                f"The recipe {name} must be a function without arguments: {error}"
            ) from error
        with functions.users_code(name):
            config = own()
        with reading(f"The recipe {name} must return a Config. Received: {config!r:.200}"):
            # as from a file, which checks the types of all options
            return from_json(
                Config, json.loads(json.dumps(dataclasses.asdict(config), default=str))
            )

    return recipe
