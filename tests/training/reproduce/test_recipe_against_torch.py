"""Steps of the paper's CIFAR recipe against the same steps in PyTorch: loss, gradients,
velocities, weights, moving statistics.

They are compared in float64, in which the two differ only by rounding. In float32,
another rounding of a sum moves the input of some ReLU across 0. With random labels, the
gradient through one ReLU among thousands is a percent of a weight's gradient, so that an
error in the decay, 1e-4 of a weight, would not be seen. In float32, only the forward
pass is compared.
"""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
from keras.src.backend.common import dtypes

import keras_preact as kp
from tests.keras_preact import harness
from training.data import crops
from training.recipes import RECIPES
from training.run import networks, plans

torch = pytest.importorskip("torch")

from tests.training.reproduce import torch_recipe  # noqa: E402

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()

#: Mean and standard deviation of CIFAR-10's training images, as in the released code.
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
SIZE, STEPS, WIDTH = 8, 3, 4

#: Largest difference, relative to the largest value of the same weight. Rounding was observed to
#: make 3e-13. TensorFlow makes float32 tensors from Python numbers, so that rate and decay have
#: errors of 2e-8, and the velocities of 2e-7.
TOLERANCE = 1e-6 if BACKEND == "tensorflow" else 1e-11


@pytest.fixture
def float64(monkeypatch):
    """All of Keras in float64: the loss and the rate, which follow floatx, and batch
    normalisation.
    """
    before = keras.config.floatx()
    # batch normalisation computes in result_type(float64, float32), which is float32 except on
    # TensorFlow
    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    wide = contextlib.nullcontext()
    if BACKEND == "jax":
        import jax

        wide = jax.enable_x64(True)
    with wide:
        keras.config.set_floatx("float64")
        yield
        keras.config.set_floatx(before)


@dataclasses.dataclass
class Case:
    """A network and a recipe; both sides train iteration `start` and the two after it."""

    arrangement: str = "full_preactivation"
    block: str = "basic"
    depth: int = 14
    recipe: str = "cifar10"
    start: int = 0

    def __post_init__(self):
        self.config = RECIPES[self.recipe]()
        self.rate = plans.learning_rate(self.config, plans.plan(self.config, 50_000))

    def __str__(self):
        return f"{self.arrangement}-{self.block}-{self.recipe}-{self.start}"

    def model(self, dtype="float64", **options):
        model = kp.models.resnet_cifar(
            self.depth,
            block=self.block,
            arrangement=self.arrangement,
            width_factor=WIDTH / 16,
            input_shape=(SIZE, SIZE, 3),
            data_format="channels_last",
            dtype=dtype,
            **options,
        )
        harness.randomize(model)
        return model

    def draws(self):
        """Yield for each step 8-bit images, the random numbers of their crops, and labels."""
        random = np.random.default_rng(3)
        n = self.config.batch_size
        for _ in range(STEPS):
            images = random.integers(0, 256, (n, SIZE, SIZE, 3), "uint8")
            yield images, crops.draw(random, n), random.integers(0, 10, n)

    def batches(self):
        return [
            (torch_recipe.batch(images, MEAN, STD, *numbers), labels)
            for images, numbers, labels in self.draws()
        ]

    def ours(self, model):
        optimizer = networks.optimizer(self.config, self.rate, model)
        model.compile(optimizer, networks.loss(self.config), jit_compile=BACKEND == "jax")
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(self.start)
        paths, states = [variable.path for variable in model.trainable_variables], []
        for images, labels in self.batches():
            model.reset_metrics()
            value = float(model.train_on_batch(np.moveaxis(images.numpy(), 1, -1), labels))
            velocities = (
                np.array(keras.ops.convert_to_numpy(each.value)) for each in optimizer.momentums
            )
            velocities = dict(zip(paths, velocities, strict=True))
            states.append(torch_recipe.State(value, harness.weights(model), velocities))
        return states

    def theirs(self, weights):
        units = (self.depth - 2) // (3 * len(torch_recipe.BLOCKS[self.block][0]))
        net = torch_recipe.ResNet(self.arrangement, self.block, units, WIDTH)
        rates = torch_recipe.paper_rates(self.recipe)[self.start :][:STEPS].tolist()
        return torch_recipe.train(
            torch_recipe.with_weights(net, weights),
            list(weights),
            self.batches(),
            rates,
            nesterov=self.recipe == "cifar10_batch64",
        )


def difference(got, want):
    """The largest difference in any weight, relative to the largest value of that weight."""
    assert got.keys() == want.keys()
    return max(
        float(np.abs(got[path] - want[path]).max() / np.abs(want[path]).max()) for path in want
    )


def differences(ours, theirs):
    """Return the differences after every step: step and compared quantity to difference."""
    errors = {}
    for step, (got, want) in enumerate(zip(ours, theirs, strict=True), 1):
        errors[step, "loss"] = abs(got.loss - want.loss) / want.loss
        errors[step, "weights"] = difference(got.weights, want.weights)
        errors[step, "velocities"] = difference(got.velocities, want.velocities)
    return errors


CASES = [
    Case(),
    Case(arrangement="original"),
    Case(block="bottleneck", depth=20),
    Case(arrangement="original", block="bottleneck", depth=20),
    Case(depth=8, recipe="cifar10_batch64"),  # Nesterov
    Case(depth=8, start=398),  # the last two steps of the warm-up and the first after it
]


#: Torch compiles nothing, so it has all cases. The other backends have two, which contain every
#: layer.
HERE = CASES if BACKEND == "torch" else (CASES[0], CASES[3])


@pytest.mark.parametrize("case", HERE, ids=str)
def test_steps_agree(case, float64):
    model = case.model()
    weights = harness.weights(model)
    ours, (theirs, gradients) = case.ours(model), case.theirs(weights)
    found = differences(ours, theirs)
    assert {where: value for where, value in found.items() if not value < TOLERANCE} == {}
    # the first velocity is -rate (gradient + decay * weight)
    rate = torch_recipe.paper_rates(case.recipe)[case.start]
    got = {
        path: -velocity / rate - 1e-4 * weights[path]
        for path, velocity in ours[0].velocities.items()
    }
    assert difference(got, gradients) < TOLERANCE


def test_float32_goes_forward_alike():
    """Compare loss and moving statistics of the first step. In float32, the batch
    statistics come from the backend's kernels.
    """
    case = Case(arrangement="original")
    model = case.model("float32")
    weights = {path: value.astype("float64") for path, value in harness.weights(model).items()}
    ours, (theirs, _) = case.ours(model)[0], case.theirs(weights)
    assert ours.loss == pytest.approx(theirs[0].loss, rel=1e-5)
    got, want = (
        {path: value for path, value in state.weights.items() if "moving" in path}
        for state in (ours, theirs[0])
    )
    assert difference(got, want) < 1e-5


def test_batches_agree():
    """Our batches are padded, cropped and flipped in 8 bits; the network's first layer
    normalises them.
    """
    case, preprocessing = Case(), kp.preprocessing.PREPROCESSING["cifar10"]
    normalize = case.model("float32", mean=preprocessing.mean, std=preprocessing.std).get_layer(
        "preprocessing"
    )
    assert (case.config.data.augmentation, case.config.data.padding) == ("pad_crop_flip", "mean")
    for images, numbers, _ in case.draws():
        assert {*numbers[0], *numbers[1]} == set(range(9))
        assert set(numbers[2]) == {True, False}
        crop_flip = crops.PadCropFlip(
            crops.pad(images, preprocessing.mean, case.config.data.padding)
        )
        got = keras.ops.convert_to_numpy(normalize(crop_flip(np.arange(len(images)), *numbers)))
        want = torch_recipe.batch(images, MEAN, STD, *numbers).numpy()
        np.testing.assert_allclose(np.moveaxis(got, -1, 1), want, atol=1e-6)
        # the released code pads with zeros after the normalisation: the two differ by less than
        # half a pixel value
        normal = (torch.tensor(images.astype("float64")) - torch.tensor(MEAN)) / torch.tensor(STD)
        zeros = torch.nn.functional.pad(normal.permute(0, 3, 1, 2), (4, 4, 4, 4))
        assert np.abs(want - torch_recipe.crop_and_flip(zeros, *numbers).numpy()).max() < 0.5 / min(
            STD
        )
