"""Find the logits of a classifier, and the function that turns them into probabilities."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from keras_preact.backend import keras_private
from keras_preact.classifiers import (
    PROBABILITIES,
    Outputs,
    activation_of,
    activation_of_logits,
)
from keras_preact.models.base import UnitNetwork
from keras_preact.models.copies import changed_copy
from keras_preact.models.input_range import expected_input
from keras_preact.preprocessing import InputRange


@dataclasses.dataclass(frozen=True)
class Scores:
    """What an export needs to know about a classifier.

    Args:
        core: Model from images with the channels last to logits and to features, the
            input of the last dense layer. It shares its layers with the classifier,
            unless the classifier has the channels first.
        probe: Model from the classifier's own images to its logits and its output.
        activation: Key of `classifiers.PROBABILITIES`, from logits to probabilities.
        gives_probabilities: Whether the classifier's output is probabilities.
        channels_first: Whether `probe` takes images with the channels first.
        expected: The range of the images.
    """

    core: keras.Model
    probe: keras.Model
    activation: str
    gives_probabilities: bool
    channels_first: bool
    expected: InputRange

    @property
    def outputs(self) -> Outputs:
        """What the logits mean."""
        return Outputs(self.core.output_shape[0][-1], self.activation, are_logits=True)

    @property
    def takes_pixels(self) -> bool:
        """Whether the classifier normalises pixels itself: not if it has no preprocessing,
        or one for pixels that are divided by 255.
        """
        return not self.expected.is_plain and self.expected.bounds != (0, 1)

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """Shape of the images, without the batch."""
        return self.core.input_shape[1:]

    @property
    def input_dtype(self) -> str:
        """Dtype of the images in the export: int32 for a model that takes tokens."""
        [tensor] = self.core.inputs
        takes_tokens = self.vocabulary is not None or tensor.dtype.startswith("int")
        return "int32" if takes_tokens else "float32"

    @property
    def vocabulary(self) -> int | None:
        """Number of the tokens that the model knows; None if it reads none with an
        `Embedding`.
        """
        return min(_vocabularies(self.core), default=None)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one test image. A free size is 64, or larger if the network needs it."""
        shapes = [tuple(n or free for n in self.input_shape) for free in (64, 128, 256, 512, 1024)]
        return next((shape for shape in shapes if self.takes(shape)), shapes[0])

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether images of a shape are large enough for layers without padding."""
        if None not in self.input_shape:
            return True
        try:
            self.core.compute_output_shape((1, *shape))
        except ValueError:  # a length would be negative
            return False
        except Exception:  # Keras cannot say it for some operations
            return True
        return True

    @property
    def dtypes(self) -> set[str]:
        """Names of the dtypes that the layers compute in, also those inside other layers."""
        return {layer.compute_dtype for layer in keras_private.sublayers(self.core)} - {None}


def take_apart(model: keras.Model, activation: str | None = None) -> Scores:
    """Find the logits of a classifier.

    Args:
        model: The classifier.
        activation: What logits without an activation mean. None: what
            `classifiers.activation_of_logits` says.

    Raises:
        ValueError: if there are no logits, or more than one input or output; the
            message says how to change the model.
    """
    if not isinstance(model, keras.Model) or not getattr(model, "inputs", None):
        raise ValueError(
            "Only a built functional or sequential Keras model can be exported: for another one "
            "use keras.Model(inputs, outputs), or give the Sequential model a keras.Input. "
            f"Received: model={model!r}"
        )
    if (batch := model.inputs[0].shape[0]) is not None:
        raise ValueError(
            "The export takes batches of any size: build the model with "
            f"keras.Input(shape), without a batch size. Received: {model.name!r} for batches of "
            f"{batch}"
        )
    loss = getattr(model, "loss", None)
    end = _end(model, loss)
    activation = activation or end.activation
    if activation == "softmax" and end.logits.shape[-1] == 1:
        raise ValueError(
            "The softmax of one output is always 1. Build a binary classifier with a sigmoid, or "
            f"without an activation. Received: {model.name!r} with one output and a softmax"
        )
    served = _with_channels_last(model) if isinstance(model, UnitNetwork) else model
    of_served = end if served is model else _end(served, loss)
    return Scores(
        core=keras.Model(served.inputs[0], [of_served.logits, of_served.features]),
        probe=keras.Model(model.inputs[0], [end.logits, model.outputs[0]]),
        activation=activation,
        gives_probabilities=end.gives_probabilities,
        channels_first=served is not model,
        expected=expected_input(model),
    )


def _with_channels_last(model: UnitNetwork) -> UnitNetwork:
    """Return a copy that takes images with the channels last, as clients and TensorFlow
    on a CPU do. A network that already takes them is returned itself.
    """
    config = model.get_config()
    if config["data_format"] != "channels_first" or len(model.input_shape) != 4:
        return model
    channels, *size = config["input_shape"]
    return changed_copy(model, input_shape=[*size, channels], data_format="channels_last")


@dataclasses.dataclass(frozen=True)
class _End:
    """The end of a classifier.

    Args:
        logits, features: Keras tensors; the features are the input of the last dense
            layer.
        activation: Key of `classifiers.PROBABILITIES`, from logits to probabilities.
        gives_probabilities: Whether the classifier's output is probabilities.
    """

    logits: Any
    features: Any
    activation: str
    gives_probabilities: bool

    def with_probabilities(self, activation: str) -> "_End":
        return dataclasses.replace(self, activation=activation, gives_probabilities=True)


def _end(model: keras.Model, loss: Any) -> _End:
    """Return the end of a classifier, which may be inside a model that it ends in. `loss` is
    that of the whole classifier.
    """
    return _end_of_network(model, loss) if isinstance(model, UnitNetwork) else _find(model, loss)


def _end_of_network(model: UnitNetwork, loss: Any) -> _End:
    if model.logits is None:
        raise ValueError(
            "The model has no classifier, so there are no logits to export: build it with "
            f"include_top=True. Received: {model.name!r} with include_top=False"
        )
    end = _of_logits(model.logits, loss)
    name = model.arguments["classifier_activation"]
    if name in (None, "linear"):
        return end
    if name not in PROBABILITIES:
        raise ValueError(
            "The classifier's activation must be None, 'softmax' or 'sigmoid', because others do "
            f"not return probabilities. Received: {model.name!r} with "
            f"classifier_activation={name!r}"
        )
    return end.with_probabilities(name)


def _of_logits(logits, loss: Any) -> _End:
    """Return the end of a classifier that returns these logits of a dense layer."""
    activation = activation_of_logits(logits.shape[-1], loss)
    return _End(logits, _origin(logits)[1], activation, False)


def in_dtype(model: keras.Model, dtype: str, error: str) -> UnitNetwork:
    """Return the same network with another dtype policy.

    Raises:
        ValueError: with the message `error`, if the model is not a network of this
            package.
    """
    if not isinstance(model, UnitNetwork):
        raise ValueError(error)
    return changed_copy(model, dtype=dtype)


def _find(model: keras.Model, loss: Any) -> _End:
    """Return the end of a model that ends in a dense layer, or in a model that does."""
    if len(model.inputs) != 1 or len(model.outputs) != 1 or len(model.outputs[0].shape) != 2:
        shapes = [tuple(tensor.shape) for tensor in (*model.inputs, *model.outputs)]
        raise ValueError(
            "The model must have one input, and one output of shape (batch, classes). Received: "
            f"{len(model.inputs)} inputs and {len(model.outputs)} outputs of the shapes {shapes}"
        )
    output = _before_casts(model.outputs[0])
    last, source = _origin(output)
    if keras_private.is_nested(last):
        return _inside(last, source, loss)
    name = activation_of(last)
    if isinstance(last, keras.layers.Dense):
        if name == "linear":
            return _of_logits(output, loss)
        if name in PROBABILITIES:
            logits = _linear_copy(last)(source)
            return _of_logits(logits, loss).with_probabilities(name)
    elif name in PROBABILITIES:
        logits = _before_casts(source)
        before, of_before = _origin(logits)
        if isinstance(before, keras.layers.Dense) and activation_of(before) == "linear":
            return _of_logits(logits, loss).with_probabilities(name)
        if keras_private.is_nested(before):
            end = _inside(before, of_before, loss)
            if not end.gives_probabilities:
                return end.with_probabilities(name)
    raise ValueError(
        "The model must end in a Dense layer whose output is the logits: one without activation, "
        "with activation='softmax' or 'sigmoid', or with such an activation as the layer after "
        f"it. Received: a model that ends in {last!r}{_with_activation(last)}"
    )


def _inside(model: keras.Model, source, loss: Any) -> _End:
    """Return the end of a nested model, which is called with `source`."""
    end = _end(model, loss)
    part = keras.Model(model.inputs[0], [end.logits, end.features], name=f"{model.name}_logits")
    logits, features = part(source)
    return dataclasses.replace(end, logits=logits, features=features)


def _vocabularies(model: keras.Model) -> Iterator[int]:
    """Yield the numbers of tokens of the embeddings that read the input of a model."""
    [tensor] = model.inputs
    for node in keras_private.nodes(model):
        reader = node.operation
        if all(each is not tensor for each in node.input_tensors):
            continue
        if isinstance(reader, keras.layers.Embedding):
            yield reader.input_dim
        elif keras_private.is_nested(reader):
            yield from _vocabularies(reader)


def _before_casts(tensor):
    """Return a Keras tensor before the layers that only cast it, as mixed precision needs."""
    operation, source = _origin(tensor)
    while type(operation) is keras.layers.Activation and activation_of(operation) == "linear":
        tensor = source
        operation, source = _origin(tensor)
    return tensor


def _with_activation(layer) -> str:
    function = getattr(layer, "activation", None)
    name = getattr(function, "__name__", type(function).__name__)
    return "" if function is None else f" with the activation {name}"


def _origin(tensor):
    """Return the operation that makes a Keras tensor, and the operation's first input."""
    operation, node_index, _ = tensor._keras_history
    inputs = keras_private.calls(operation)[node_index].input_tensors
    return operation, inputs[0] if inputs else None


def _linear_copy(layer: keras.layers.Dense) -> keras.layers.Dense:
    copy = type(layer).from_config(
        layer.get_config() | {"activation": "linear", "name": f"{layer.name}_logits"}
    )
    copy.build(layer.kernel.shape[:-1])
    copy.set_weights(layer.get_weights())
    return copy
