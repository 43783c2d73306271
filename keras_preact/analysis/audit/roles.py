"""What a step of a graph is: a weight layer, a normalisation, an activation or dropout."""

import keras

from keras_preact.graph import Step

#: Class names of layers and operations that are activations, in lower case.
ACTIVATIONS = frozenset(
    name.replace("_", "") for name in dir(keras.activations) if name[0] != "_"
) - {"linear", "get", "serialize", "deserialize"}

#: Normalisations over the features of one token, as in transformers.
PER_TOKEN = ("LayerNorm", "RMSNorm")


def roles(step: Step) -> tuple[str, ...]:
    """Return the roles of a step: any of `"weight"`, `"norm"`, `"activation"`,
    `"dropout"`.
    """
    operation, kind = step.operation, step.kind
    if kind == "Activation" or step.has_kernel:
        function = getattr(operation, "activation", None)
        active = callable(function) and function is not keras.activations.linear
        return ("weight",) * step.has_kernel + ("activation",) * active
    if "Norm" in kind:
        is_preprocessing = isinstance(operation, keras.layers.Normalization)
        return () if is_preprocessing else ("norm",)
    if kind.replace("_", "").lower() in ACTIVATIONS:
        return ("activation",)
    return ("dropout",) if getattr(operation, "seed_generator", None) is not None else ()
