"""Recipes: functions that return a `Config`. `python -m training.train RECIPE` runs one; options change its fields.

Each says what it reaches: the published number with its source (`kp.published`), the number that was measured here, or that
nothing was.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras_preact as kp

from .config import Config, Data, Model, Optimizer, Schedule

_CIFAR10 = Data("cifar10", augmentation="pad_crop_flip")


def digits() -> Config:
    """Pre-activation ResNet-20 on scikit-learn's handwritten digits: no download, about a minute on two cores.

    The test of `make demo` holds it to 98 % of the test images. The weight decay was chosen on these very images, so the
    figure says that the whole way works, not how well the network generalises.
    """
    return Config(
        model=Model("digits_resnet20_preact"),
        data=Data("digits"),
        optimizer=Optimizer(weight_decay=5e-3),
        schedule=Schedule("cosine", length=30, warmup=2),
        batch_size=64,
    )


def cifar10() -> Config:
    """The paper's CIFAR recipe: batch 128, 64k iterations, rate 0.1 divided by 10 at 32k and 48k, warm-up of 400 iterations.

    ResNet-20 by default; deeper: --model.name cifar_resnet110_preact. Published test errors: 8.75 % for the original ResNet-20
    (Table 6 of arXiv 1512.03385), 6.37 % for the pre-activation ResNet-110 and 5.46 % for ResNet-164 (Table 2 of
    arXiv 1603.05027, medians of 5), 4.92 % for ResNet-1001 (Table 3). Not measured here.
    """
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=_CIFAR10,
        schedule=Schedule("steps", drops=(32_000, 48_000), warmup=400, length=64_000, unit="iterations"),
    )


def cifar10_batch64() -> Config:
    """The recipe of ResNet-1001's 4.62 %: batch 64, 200 epochs, rate 0.1 divided by 10 at epochs 81 and 122, Nesterov.

    Published test error: 4.62 %, the median of 5 runs, 4.69 +- 0.20 (Table 4 of arXiv 1603.05027). Not measured here.
    """
    return Config(
        model=Model("cifar_resnet1001_preact"),
        data=_CIFAR10,
        optimizer=Optimizer(nesterov=True),
        schedule=Schedule("steps", drops=(81, 122), warmup=400 / 781, length=200),  # 781 iterations an epoch, 400 of warm-up
        batch_size=64,
    )


def cifar10_short() -> Config:
    """A short run for a CPU: ResNet-20, cosine with warm-up over 15 epochs. Not the paper's recipe.

    Measured: 12.05 % test error, one run (the card in saved_models/cifar10_resnet20).
    """
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=dataclasses.replace(_CIFAR10, watch_test=True),
        optimizer=Optimizer(weight_decay=5e-4, nesterov=True),
        schedule=Schedule("cosine", length=15, warmup=1),
    )


def cifar10_quick() -> Config:
    """For about 10 minutes on two cores of a CPU: ResNet-20, 5 epochs, cosine with a warm-up of one, Nesterov.

    Measured: 18.23 % test error, one run (seed 0, TensorFlow), 6:44 minutes.
    """
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=_CIFAR10,
        optimizer=Optimizer(weight_decay=5e-4, nesterov=True),
        schedule=Schedule("cosine", length=5, warmup=1),
    )


def cifar10_modern() -> Config:
    """What came after the paper: ResNet-110, 200 epochs, cosine with warm-up, label smoothing, an average of the weights.

    Nesterov, and the normalisations are not decayed. Cosine: arXiv 1608.03983, warm-up: arXiv 1706.02677, label smoothing of
    0.1: arXiv 1512.00567; the average keeps 0.999 of itself in an update, about 2.5 epochs. Nothing is published for it, and
    nothing was measured.
    """
    return Config(
        model=Model("cifar_resnet110_preact"),
        data=_CIFAR10,
        optimizer=Optimizer(weight_decay=5e-4, nesterov=True, exclude_from_decay=("norm",), ema=0.999, label_smoothing=0.1),
        schedule=Schedule("cosine", length=200, warmup=5),
    )


def cifar100() -> Config:
    """The paper's CIFAR recipe on CIFAR-100, ResNet-164 by default.

    Published test errors: 24.33 % for ResNet-164, 22.71 % for ResNet-1001 (Table 3 of arXiv 1603.05027, medians of 5). Not
    measured here.
    """
    return Config(
        model=Model("cifar_resnet164_preact"),
        data=Data("cifar100", augmentation="pad_crop_flip"),
        schedule=cifar10().schedule,
    )


def imagenet() -> Config:
    """The paper's ImageNet recipe: batch 256, 90 epochs, rate 0.1 divided by 10 at epochs 30 and 60, no warm-up.

    ResNet-50 by default, for which the paper has no number; --model.name imagenet_resnet200_preact is its ResNet-200.
    Published for that, with this augmentation (scale and aspect ratio), tested on one crop of 320 pixels: 20.1 % top-1 and
    4.8 % top-5 error (Table 5 of arXiv 1603.05027). Not measured here.
    """
    return Config(
        model=Model("imagenet_resnet50_preact"),
        data=Data("imagenet2012", augmentation="resized_crop_flip", size=224),
        schedule=Schedule("steps", drops=(30, 60), length=90),
        batch_size=256,
    )


def folder() -> Config:
    """Your own images, --data.dir FOLDER with train/CLASS/IMAGE and test/CLASS/IMAGE: ResNet-18, cosine with warm-up.

    What it reaches depends on them; nothing was measured.
    """
    return Config(
        model=Model("imagenet_resnet18_preact"),
        data=Data("folder", augmentation="resized_crop_flip", size=224),
        schedule=Schedule("cosine", length=50, warmup=5),
        batch_size=32,
    )


def finetune() -> Config:
    """A trained network, --model.weights RUN or FILE.keras, for your own images, --data.dir FOLDER as for folder.

    A new classifier, every weight trained from a tenth of the usual rate on, ten epochs of cosine. --model.freeze stage2 keeps
    the first stages, --optimizer.layer-decay 0.7 lets them change less. What it reaches depends on the images; measured was
    digits alone, by its test.
    """
    return Config(
        model=Model(""),
        data=Data("folder", augmentation="resized_crop_flip"),
        optimizer=Optimizer(learning_rate=0.01, nesterov=True),
        schedule=Schedule("cosine", length=10, warmup=1),
        batch_size=32,
    )


#: Weight layers of the networks that have a recipe by the guide's tables of depths.
DEPTHS = (20, 56, 110, 164, 1001)
#: Epochs of those: the paper's 64k iterations of 128 images are 163.8.
DEPTH_EPOCHS = 164


def by_depth(depth: int) -> Config:
    """Return how `kp.recommend` would train the paper's CIFAR network of this depth: the guide's rate, schedule and clipping.

    The rate is given for batches of 256 images and grows with the root of the batch size, as the guide has it. The network
    stays the paper's, ReLU and initial values included.
    """
    advice = kp.recommend(depth=depth)
    steps = advice.decay == "steps"
    return Config(
        model=Model(f"cifar_resnet{depth}_preact"),
        data=_CIFAR10,
        optimizer=Optimizer(
            learning_rate=advice.learning_rate,
            scaling="sqrt",
            reference_batch_size=advice.batch_size,
            clip_norm=advice.clip_norm,
        ),
        schedule=Schedule(
            "steps" if steps else "cosine",
            drops=tuple(share * DEPTH_EPOCHS for share in advice.drops) if steps else (),
            warmup=advice.warmup_epochs,
            length=DEPTH_EPOCHS,
        ),
    )


def _recipe_of_depth(depth: int) -> Callable[[], Config]:
    def recipe() -> Config:
        return by_depth(depth)

    schedule, optimizer = recipe().schedule, recipe().optimizer
    decay = f"cosine with {schedule.warmup:g} epochs of warm-up" if schedule.warmup else "divided by 10 at 1/2 and 3/4"
    clip = "" if optimizer.clip_norm is None else f", gradients clipped to {optimizer.clip_norm:g}"
    recipe.__name__ = f"cifar10_depth{depth}"
    recipe.__doc__ = (
        f"ResNet-{depth} by the guide's tables (`kp.recommend`): rate {optimizer.learning_rate:g}, {decay}{clip}.\n\n"
        f"The rate is for batches of 256; {DEPTH_EPOCHS} epochs. Nothing is published for it, and nothing was measured."
    )
    return recipe


#: Name on the command line to recipe.
RECIPES: Mapping[str, Callable[[], Config]] = MappingProxyType(
    {
        recipe.__name__: recipe
        for recipe in (
            *(digits, cifar10, cifar10_batch64, cifar10_short, cifar10_quick, cifar10_modern),
            *map(_recipe_of_depth, DEPTHS),
            *(cifar100, imagenet, folder, finetune),
        )
    }
)
