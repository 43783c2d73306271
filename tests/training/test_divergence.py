"""Losses that are not finite, each with a cause that is known: the explanation names
it.
"""

import re

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.health import TrainingHealth
from keras_preact.health.probe import Probe
from keras_preact.health.weights import owners, places
from tests.training.test_checkpoints import no_warning, same, values
from training import divergence
from training.checkpoints import Checkpoints

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
JIT = "auto" if BACKEND == "jax" else False


class Root(keras.layers.Layer):
    """The square root of the square: finite wherever x is, with a gradient of inf times
    0 at 0.
    """

    def call(self, x):
        return ops.sqrt(ops.square(x))


def chain(**compiled) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(4, use_bias=False, name="first"),
        Root(),
        keras.layers.Dense(2, name="second"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers], name="chain")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=JIT, **compiled)
    return model


def dense(stacked: bool, **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = kp.models.dense_resnet(
        14, input_shape=(3,), width=4, classes=2, stacked=stacked, **options
    )
    stacks = [layer.depth for layer in model.layers if isinstance(layer, kp.UnitStack)]
    assert stacks == ([5] if stacked else [])
    return model


def fill(model, name: str, value: float) -> None:
    """Give a weight the value, in a stack that of one unit."""
    owner = owners(model)
    found = []
    for variable in model.trainable_variables:
        names = [place.name for place in places(variable.path, owner.get(id(variable)))]
        if name in names:
            array = np.array(ops.convert_to_numpy(variable.value))
            array[names.index(name) if len(names) > 1 else ...] = value
            variable.assign(array)
            found.append(name)
    assert found == [name]


def stream(bad=None, x=1.0, y=1.0):
    """Return a function like `Run.batches`: all batches are harmless but that of
    the step `bad`.
    """

    def batches(step):
        while True:
            random = np.random.default_rng(step)
            images, labels = (random.normal(size=(4, n)).astype("float32") for n in (3, 2))
            scales = (x, y) if step == bad else (1.0, 1.0)
            yield images * np.float32(scales[0]), labels * np.float32(scales[1])
            step += 1

    return batches


def saved(folder, model, step=0):
    Checkpoints(folder).save(model, {"step": step})
    return Checkpoints(folder).newest(no_warning)


def explained(folder, model, batches, step, begin=0, **options):
    """Explain, and check that the model is as before."""
    checkpoint = saved(folder, model, begin)
    before = values(model, ("model", "optimizer"))
    message = divergence.explain(model, checkpoint, batches, step, learning_rate=0.5, **options)
    assert same(values(model, ("model", "optimizer")), before)
    kept = "the beginning" if begin == 0 else f"step {begin}"
    assert message.endswith(f". Last checkpoint: {checkpoint.path}, of {kept}.")
    if not message.startswith("The images"):
        assert message.startswith("Learning rate 0.5 is probably too high: the loss is ")
        assert "Lower --optimizer.learning-rate or lengthen --schedule.warmup. Cause: " in message
    return message


class TestForwardPass:
    def test_the_layer_that_overflows(self, tmp_path):
        """Inputs of 1e20 are finite in the network, and their squares are not."""
        message = explained(tmp_path, chain(), stream(bad=4, x=1e20), step=4)
        assert " in step 5. " in message
        assert re.search(
            r"Cause: the output of chain/root\w* is not finite, with inputs up", message
        )
        assert "e+20 (the largest float32 is 3.4e+38)." in message

    def test_the_first_of_those_whose_weights_overflow(self, tmp_path):
        model = chain()
        model.get_layer("second").kernel.assign(np.full((4, 2), 3e38, "float32"))
        model.optimizer.learning_rate = 0.0
        message = explained(tmp_path, model, stream(), step=2)
        assert "in step 1. " in message  # it began before
        assert "Cause: the output of chain/second is not finite" in message

    def test_what_is_read(self, tmp_path):
        message = explained(tmp_path, chain(), stream(bad=1, x=np.nan), step=1)
        assert message.startswith("The images of step 2 are not finite, so the loss is nan. ")

    def test_the_loss_itself(self, tmp_path):
        message = explained(tmp_path, chain(), stream(bad=1, y=1e30), step=1)
        assert "in step 2. " in message
        assert "Cause: all layers have finite outputs, the last up to " in message

    @pytest.mark.parametrize(("stacked", "weight"), [(False, "dense_2"), (True, "dense_1")])
    def test_in_units_and_stacks_of_them(self, tmp_path, stacked, weight):
        """The name is that of the unit's layer, whether the unit is in a stack or not,
        with the dropout of training.

        ReLU makes 0 of NaN on TensorFlow, ELU does not.
        """
        model = dense(stacked, dropout=0.2, activation="elu")
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=JIT)
        unit = model.units[3].name
        for name in (
            f"{unit}/branch/{weight}/kernel",
            f"{model.units[4].name}/branch/dense_1/kernel",
        ):
            fill(model, name, 3e38)
        message = explained(tmp_path, model, stream(), step=0)
        assert f"the output of {unit}/branch/{weight} is not finite" in message


class TestUpdate:
    def test_of_the_step_before(self, tmp_path):
        """Zeros make the root's gradient a NaN, which the layers before it get; the
        loss is finite in that step.
        """
        message = explained(tmp_path, chain(), stream(bad=3, x=0.0), step=4, begin=1)
        assert "the loss is nan in step 5. " in message
        assert "Cause: the update of step 4 left weights that are not finite" in message
        assert "the last of them chain/first/kernel. " in message

    def test_weights_that_are_not_finite_are_not_saved(self, tmp_path):
        """Else the last checkpoint would be one of a run that has diverged."""
        model = chain()
        Checkpoints(tmp_path, keep=1).save(model, {"step": 3})
        model.train_on_batch(*next(stream(bad=3, x=0.0)(3)))
        assert Checkpoints(tmp_path, keep=1).save(model, {"step": 4}) is None
        assert Checkpoints(tmp_path).newest(no_warning).step == 3

    def test_the_last_of_the_weights_in_the_order_of_the_forward_pass(self):
        model = dense(stacked=True)
        assert divergence._broken_weight(model) is None
        for unit in [unit.name for unit in model.units[1:4]]:
            for name in (f"{unit}/branch/dense_1/kernel", f"{unit}/branch/dense_2/kernel"):
                fill(model, name, np.nan)
                assert divergence._broken_weight(model) == name


class TestRepeating:
    def test_from_the_checkpoint_on_step_by_step(self, tmp_path):
        """Each step gets its own batch, after what has to happen before it."""
        seen = []

        def batches(step):
            seen.append(f"from {step}")
            for batch in stream(bad=6, x=np.inf)(step):
                seen.append("batch")
                yield batch

        explained(tmp_path, chain(), batches, step=6, begin=4, before_step=seen.append)
        # the random numbers of the last step come twice: for the look at the layers, and for the
        # step
        assert [each for each in seen if isinstance(each, int)] == [4, 5, 6, 6]
        assert [each for each in seen if isinstance(each, str)] == [
            "from 4",
            "batch",
            "batch",
            "batch",
        ]

    def test_the_first_bad_one_of_an_execution_of_several_steps(self, tmp_path):
        options = {} if BACKEND == "torch" else {"steps_per_execution": 4}
        model = chain(**options)
        message = explained(tmp_path, model, stream(bad=5, x=1e20), step=7)
        assert " in step 6. " in message
        assert "Cause: the output of chain/root" in message
        assert model.steps_per_execution == options.get("steps_per_execution", 1)

    def test_what_does_not_come_again(self, tmp_path):
        message = explained(tmp_path, chain(), stream(), step=2)
        assert "in step 3. " in message
        assert "Cause: unknown." in message
        assert "a computation is not deterministic." in message

    def test_words_for_steps(self, tmp_path):
        def words(step):
            return f"iteration {step // 2 + 1:,}"

        model = chain()
        arguments = (model, saved(tmp_path, model, 2), stream(bad=4, x=0.0), 5)
        message = divergence.explain(*arguments, learning_rate=1e6, where=words)
        assert message.startswith("Learning rate 1e+06 is probably too high: the loss is nan in it")
        assert "Cause: the update of iteration 3 left" in message
        assert message.endswith(", of iteration 1.")

    def test_with_the_probe_of_a_fit_that_failed(self, tmp_path):
        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise ArithmeticError

        model = chain()
        checkpoint = saved(tmp_path, model)
        x, y = next(stream()(0))
        health = TrainingHealth(1, report=lambda message: None)
        with pytest.raises(ArithmeticError):
            model.fit(x, y, verbose=0, callbacks=[health, Fail()])
        assert Probe.of(model.optimizer) is not None
        message = divergence.explain(
            model, checkpoint, stream(bad=1, x=1e20), 1, learning_rate=0.01
        )
        assert " in step 2. " in message
        assert "Cause: the output of chain/root" in message
        health.remove()
        model.fit(x, y, verbose=0, callbacks=[TrainingHealth(1, report=lambda message: None)])
