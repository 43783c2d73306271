"""UnitNetwork: the base class of all networks of residual units."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from keras_preact import _checks, compiled, initializers
from keras_preact._inside import check_not_quantized, freeze_inside, frozen_inside
from keras_preact.backend import devices, state
from keras_preact.layers import chains
from keras_preact.models import first_batch, overview, segments
from keras_preact.models.input_range import expected_input
from keras_preact.models.segments import Segment, stream_layers
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit


@dataclasses.dataclass
class _Parts:
    """Attributes of a network that Keras must not track a second time."""

    arguments: dict
    segments: list[Segment]
    head: list[keras.Layer]
    first_input: Any
    segment_outputs: list
    logits: Any
    unit_outputs: list | None = None


class UnitNetwork(keras.Model):
    """A functional model: a stem, residual units one after the other, and a head.

    Args:
        input_shape: Shape without the batch.
        axis: Axis of the channels, or features, in a batch.
        mean, std: Mean and standard deviation that normalise the inputs, numbers or one
            per channel. If both are None, there is no such layer.
        stem: The layers before the first unit.
        segments: The residual units and stacks of them, in order.
        head: The layers from the last unit to the classifier.
        classes: Outputs of the classifier; None for none.
        activation: Activation of the classifier, in any form that Keras layers take;
            None for none.
        kernel: The network's initialiser.
        policy: The dtype policy. Preprocessing and classifier compute in its variable
            dtype; preprocessing at least in float32, because the variance of pixels
            overflows in float16.
        arguments: The arguments of the subclass for the config, without the arguments
            above.
        name: Name of the model.

    Attributes:
        segments: The residual units and stacks of them, in order.
        units: The residual units in order, layers of the network. A ValueError for a
            network with stacks, whose units are no layers: see `copy_units`.
        unit_names: Names of all units in order, including the units of stacks.
        arguments: The arguments of the network, in the form in which `get_config` has
            them: `model.arguments["stem"]`.
        unit_outputs: x_1 ... x_L as Keras tensors: `keras.Model(model.input,
            model.unit_outputs)` computes them.
        logits: The classifier's output before its activation, a Keras tensor; None
            without a classifier.
        first_input: Input of the first segment, a Keras tensor.
        segment_outputs: Output of each segment, Keras tensors.
        head: The layers after the last unit, with the classifier.
    """

    def __init__(
        self,
        input_shape: Sequence[int | None],
        *,
        axis: int,
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
        stem: Sequence[keras.Layer],
        segments: Sequence[Segment],
        head: Sequence[keras.Layer],
        classes: int | None,
        activation: Any,
        kernel: keras.initializers.Initializer,
        policy: keras.DTypePolicy,
        arguments: dict,
        name: str | None,
    ):
        dtype = policy.variable_dtype
        is_plain = mean is None and std is None
        pixels = dtype if is_plain else keras.backend.result_type(dtype, "float32")
        inputs = keras.Input(input_shape, dtype=pixels, name="inputs")
        x = chains.run_chain(_preprocessing(mean, std, axis, inputs.shape[axis], pixels), inputs)
        into_streams, from_streams = stream_layers(segments)
        head = [*from_streams, *head]
        x = first_input = chains.run_chain([*stem, *into_streams], x)
        segment_outputs = []
        for segment in segments:
            x = segment(x)
            segment_outputs.append(x)
        x = chains.run_chain(head, x)
        activation = activation and chains.get_activation(activation)
        logits, top = None, []
        if classes is not None:
            top = _classifier(classes, activation, kernel, dtype)
            logits = top[0](x)
            x = chains.run_chain(top[1:], logits)
        super().__init__(inputs=inputs, outputs=x, name=name)
        arguments = _checks.plain(arguments) | {
            "input_shape": _checks.plain(list(input_shape)),
            "classifier_activation": activation and chains.activation_config(activation),
            "mean": mean if mean is None else np.asarray(mean, "float64").tolist(),
            "std": std if std is None else np.asarray(std, "float64").tolist(),
            "dtype": keras.dtype_policies.serialize(policy),
        }
        self._parts = _Parts(
            _without_shared_ids(arguments),
            list(segments),
            [*head, *top],
            first_input,
            segment_outputs,
            logits,
        )

    @property
    def arguments(self) -> Mapping[str, Any]:
        return MappingProxyType(self._parts.arguments)

    @property
    def segments(self) -> list[Segment]:
        return list(self._parts.segments)

    @property
    def units(self) -> list[ResidualUnit]:
        stacks = [segment.name for segment in self.segments if isinstance(segment, UnitStack)]
        if stacks:
            raise ValueError(
                "The units of a stack are not layers of the network. Use `model.segments` for the "
                "layers, `model.unit_names` for the names, `model.copy_units()` for copies of all "
                "units, or `kp.models.unstack(model)` for a network without stacks. Received: "
                f"{self.name!r} with the stacks {', '.join(stacks)}"
            )
        return self.segments

    @property
    def unit_names(self) -> list[str]:
        return [name for segment in self.segments for name in segments.unit_names(segment)]

    def copy_units(self) -> list[ResidualUnit]:
        """Return a copy of each residual unit in order, with its weights and seeds. A
        change of a copy does not change the network.

        Example:

        >>> import keras_preact as kp
        >>> model = kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1))
        >>> units = model.copy_units()
        >>> len(units), units[1].name, units[1].strides
        (9, 'stage1_unit2', 1)
        """
        return [unit for segment in self.segments for unit in segments.copies_of(segment)]

    @property
    def unit_outputs(self) -> list:
        if self._parts.unit_outputs is None:  # every call of a layer stays in the model's graph
            self._parts.unit_outputs = self._call_units()
        return list(self._parts.unit_outputs)

    def _call_units(self) -> list:
        if not any(isinstance(segment, UnitStack) for segment in self.segments):
            return self.segment_outputs
        outputs, x = [], self.first_input
        for segment in self.segments:
            if isinstance(segment, UnitStack):
                x = segment(x, return_outputs=True)
                outputs += [x[i] for i in range(segment.depth)]
            else:
                outputs.append(segment(x))
            x = outputs[-1]
        return outputs

    @property
    def logits(self):
        return self._parts.logits

    @property
    def first_input(self):
        return self._parts.first_input

    @property
    def segment_outputs(self) -> list:
        return list(self._parts.segment_outputs)

    @property
    def head(self) -> list[keras.Layer]:
        return list(self._parts.head)

    def describe(self) -> str:
        """Return the parts of the network with their sizes, and each kind of unit in it with
        its layers in order. A notebook shows the same for a network in the last line of a
        cell.

        Example:

        >>> import keras_preact as kp
        >>> print(kp.models.resnet_cifar(8, input_shape=(8, 8, 1)).describe())
        ResidualNetwork 'cifar_resnet8': input 8 x 8 x 1
        part    units  output      parameters
        stem           8 x 8 x 16         208
        stage1      1  8 x 8 x 16       4,672
        stage2      1  4 x 4 x 32      14,016
        stage3      1  2 x 2 x 64      55,680
        head           10                 906
        total       3                  75,482
        <BLANKLINE>
        stage1_unit1
        F: conv_1 3x3, norm_1, relu, conv_2 3x3
        h: identity
        f: identity
        <BLANKLINE>
        stage2_unit1 and 1 more
        F: norm_0, relu, conv_1 3x3/2, norm_1, relu, conv_2 3x3
        h: zero_pad
        f: identity
        """
        return overview.text(self)

    def _repr_html_(self) -> str:
        return overview.page(self)

    def probe(self) -> keras.Model:
        """Return a model with the same layers that adds tensors to every x_l, and
        returns every x_l.

        If the added tensors are zeros, their gradients are the gradients of the x_l, for
        any loss.

        Input: `[images, p_1, p_2, ...]`, with a tensor of shape `(units, batch, *shape
            of x_l)` for every segment. It is added to the outputs of the segment's
            units. A segment is a stack of units or a single unit.

        Output: `[output, x_1, x_2, ...]` with the outputs of every segment's units, of
            the same shapes.

        Example:

        >>> import numpy as np
        >>> import keras_preact as kp
        >>> model = kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1))
        >>> probe = model.probe()
        >>> zeros = [np.zeros((n.shape[0], 5, *n.shape[2:]), "float32") for n in probe.inputs[1:]]
        >>> output, *x = probe([np.zeros((5, 8, 8, 1), "float32"), *zeros])
        >>> [tuple(stage.shape) for stage in x][:3]
        [(1, 5, 8, 8, 16), (2, 5, 8, 8, 16), (1, 5, 4, 4, 32)]
        """
        x, added, outputs = self.first_input, [], []
        for segment, output in zip(self.segments, self.segment_outputs, strict=True):
            depth = len(segments.unit_names(segment))
            added.append(
                keras.Input(
                    batch_shape=(depth, *output.shape),
                    dtype=output.dtype,
                    name=f"added_{segment.name}",
                )
            )
            if isinstance(segment, UnitStack):
                outputs.append(segment(x, perturbations=added[-1], return_outputs=True))
            else:
                outputs.append(keras.ops.expand_dims(segment(x), 0) + added[-1])
            x = outputs[-1][-1]
        return keras.Model([self.inputs[0], *added], [chains.run_chain(self.head, x), *outputs])

    def compile(
        self,
        optimizer="rmsprop",
        loss=None,
        loss_weights=None,
        metrics=None,
        weighted_metrics=None,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=True,
    ):
        """Compile the model as Keras does. Warn if the loss or a metric takes logits and the
        network returns probabilities, or the other way round.

        `jit_compile="auto"` uses no XLA for TensorFlow on a CPU, where it is slower.
        `jit_compile=True` has no effect on PyTorch, with a warning.
        """
        super().compile(
            optimizer,
            loss,
            loss_weights,
            metrics,
            weighted_metrics,
            run_eagerly,
            steps_per_execution,
            jit_compile,
            auto_scale_loss,
        )
        self._jit_choice = jit_compile
        if jit_compile == "auto" and devices.xla_is_slower():
            self.jit_compile = False
        elif self.jit_compile and keras.backend.backend() == "torch":
            # torch.compile follows Keras' own code and ends in an error of its compiler; where it
            # does not, as with shapes that are all fixed, a step takes longer than without
            warnings.warn(
                "torch.compile does not compile the train step of these networks: "
                "jit_compile=True has no effect on PyTorch.",
                stacklevel=2,
            )
            self.jit_compile = False
        if self.logits is not None:
            activation = self.arguments["classifier_activation"]
            of_output = activation, self.logits.shape[-1]
            wrong = compiled.loss_problem(loss, *of_output, option="classifier_activation")
            metrics = [metrics, weighted_metrics]
            found = [wrong] if wrong else compiled.metric_problems(metrics, loss, *of_output)
            for problem in found:
                warnings.warn(problem, stacklevel=2)

    def make_train_function(self, force=False):
        state.build_optimizer(self)
        return super().make_train_function(force)

    def get_compile_config(self):
        config = super().get_compile_config()
        # Keras saves its choice for this backend. With torch's choice, JAX would compute without
        # `jit`, very slowly; with TensorFlow's choice, torch would compile.
        if config:
            config["jit_compile"] = self._jit_choice
        return config

    def compile_from_config(self, config):
        # Keras requires this method of models that override `compile`.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
    ):
        """Fit the model as Keras does.

        Warn if the values of an array, or of the first batch of other data, are not in
        the range that the network expects (`kp.models.expected_input`). Labels without a
        class raise a ValueError, in every kind of data but Grain's.
        """
        held_out, checks = self._checks(), self._checks()
        with held_out.reported(), checks.reported(), state.kept(self):
            if isinstance(validation_data, tuple):
                # `evaluate` checks the images
                held_out.watched(None, (*validation_data, None)[1])
            else:
                validation_data = held_out.watched(validation_data)
            return super().fit(
                checks.watched(x, y),
                y,
                batch_size,
                epochs,
                verbose,
                callbacks,
                validation_split,
                validation_data,
                shuffle,
                class_weight,
                sample_weight,
                initial_epoch,
                steps_per_epoch,
                validation_steps,
                validation_batch_size,
                validation_freq,
            )

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size=None,
        verbose="auto",
        sample_weight=None,
        steps=None,
        callbacks=None,
        return_dict=False,
        **kwargs,
    ):
        """Evaluate the model as Keras does, with the checks of `fit`."""
        checks = self._checks()
        with checks.reported(), state.kept(self):
            return super().evaluate(
                checks.watched(x, y),
                y,
                batch_size,
                verbose,
                sample_weight,
                steps,
                callbacks,
                return_dict,
                **kwargs,
            )

    def predict(self, x, batch_size=None, verbose="auto", steps=None, callbacks=None):
        """Predict as Keras does, and warn as `fit` does."""
        expected = expected_input(self)
        with state.kept(self):
            watched = first_batch.Checks(expected).watched(x)
            return super().predict(watched, batch_size, verbose, steps, callbacks)

    def _checks(self) -> first_batch.Checks:
        expected = expected_input(self)
        if self.logits is None or not self.compiled:
            return first_batch.Checks(expected)
        return first_batch.Checks(expected, self.loss, self.logits.shape[-1])

    def quantize(self, mode=None, config=None, **kwargs):
        """Raise an error: a saved network cannot contain quantized layers.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.name!r} cannot be quantized: its saved file would not load, and Keras "
            "quantizes only dense layers. Export the network in bfloat16 or int8. Received: "
            f"mode={mode!r}"
        )

    def get_config(self):
        check_not_quantized(self)
        frozen_layers = [layer.name for layer in self.layers if not layer.trainable]
        for layer in self.layers:
            frozen_layers += [f"{layer.name}/{path}" for path in frozen_inside(layer)]
        return _without_shared_ids(dict(self.arguments)) | {
            "name": self.name,
            "frozen_layers": frozen_layers,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        frozen_layers = config.pop("frozen_layers", ())
        model = cls(**config)
        for path in frozen_layers:
            name, _, inside = path.partition("/")
            if inside:
                freeze_inside(model.get_layer(name), [inside])
            else:
                model.get_layer(name).trainable = False
        return model


def check_network(model: object) -> None:
    """Raise a ValueError unless `model` is a network of residual units."""
    if isinstance(model, UnitNetwork):
        return
    layers = model.layers if isinstance(model, keras.Model) else []
    is_clone = any(isinstance(layer, ResidualUnit | UnitStack) for layer in layers)
    raise ValueError(
        "`model` must be a network of residual units, such as a model of `kp.models`. "
        + "`keras.models.clone_model` makes a plain model of one: use "
        "`kp.models.changed_copy(model)`. " * is_clone + f"Received: {model!r}"
    )


def _without_shared_ids(config):
    """Return a copy of a config, without the ids of shared objects that Keras adds while it
    loads a file: they are valid only for that file.
    """
    if isinstance(config, dict):
        return {
            key: _without_shared_ids(value)
            for key, value in config.items()
            if key != "shared_object_id"
        }
    return [_without_shared_ids(value) for value in config] if isinstance(config, list) else config


def _preprocessing(mean, std, axis: int, channels: int, dtype: str) -> list[keras.Layer]:
    """Make the layer that turns pixels into `(x - mean) / std`: a list with one layer,
    or an empty list if both are None.
    """
    if mean is None and std is None:
        return []
    mean = np.zeros(()) if mean is None else np.asarray(mean, "float64")
    std = np.ones(()) if std is None else np.asarray(std, "float64")
    for value, argument in ((mean, "mean"), (std, "std")):
        if value.shape not in ((), (1,), (channels,)):
            raise ValueError(
                f"`{argument}` must be one number or {channels}, one per channel. Received: "
                f"{argument}={value}"
            )
    if not np.isfinite(mean).all():
        raise ValueError(f"`mean` must be finite. Received: mean={mean}")
    if not ((std > 0) & (std < np.inf)).all():
        raise ValueError(f"`std` must be positive and finite. Received: std={std}")
    mean, variance = (np.broadcast_to(value, (channels,)).tolist() for value in (mean, std**2))
    return [
        keras.layers.Normalization(
            axis=axis, mean=mean, variance=variance, name="preprocessing", dtype=dtype
        )
    ]


def _classifier(classes: int, activation, kernel, dtype: str) -> list[keras.Layer]:
    """Make the layer of the logits, and an activation layer unless that is None."""
    layers: list[keras.Layer] = [
        keras.layers.Dense(
            classes,
            kernel_initializer=initializers.of_classifier(kernel),
            name="head_classifier",
            dtype=dtype,
        )
    ]
    if activation is not None:
        predictions = chains.activation_layer(activation, name="head_predictions", dtype=dtype)
        layers.append(predictions)
    return layers
