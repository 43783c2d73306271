"""Derivatives of functions of tensors, with one interface for the three backends.
Nothing here changes a variable.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
from keras import ops

from keras_preact.backend import keras_private


def compiled(function: Callable) -> Callable:
    """Return `function` of tensors, compiled if the backend has a compiler. Use it for
    functions that are called more than once.
    """
    pure = _without_side_effects(function)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(pure)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(pure)
    return pure


def without_gradients() -> contextlib.AbstractContextManager:
    """Return a context in which PyTorch keeps nothing for gradients. The other backends
    keep it only on request.
    """
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


@contextlib.contextmanager
def same_random_numbers(*layers: keras.Layer) -> Iterator[None]:
    """Return a context in which layers draw random numbers from variables, which nothing
    here changes, so that all passes have the same.

    Only PyTorch needs it: there Keras' dropout without a seed draws from the process's own
    generator, which stays as it was.
    """
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    generators = [each for layer in layers for each in keras_private.generators_without_seed(layer)]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        for generator in generators:
            keras_private.set_seed(generator, 0)
        try:
            yield
        finally:
            for generator in generators:
                keras_private.set_seed(generator, None)


def value_and_gradients(
    function: Callable, arrays: Sequence, variables: Sequence[keras.Variable] = ()
):
    """Return the outputs of `function(*arrays)`, and the gradients of its value.

    Args:
        function: Function that returns its value, a scalar, and auxiliary outputs,
            nested lists of tensors.
        arrays: Tensors or arrays to compute gradients for.
        variables: Variables to compute gradients for.

    Returns:
        `(value, auxiliary outputs, gradients of the arrays, gradients of the
        variables)`. A gradient is zero if the value does not depend on its tensor.
    """
    arrays = [ops.convert_to_tensor(array) for array in arrays]
    values = [ops.convert_to_tensor(variable.value) for variable in variables]

    def pure(*tensors):
        with keras.StatelessScope(list(zip(variables, tensors[len(arrays) :], strict=True))):
            return function(*tensors[: len(arrays)])

    value, aux, gradients = _GRADIENTS[keras.backend.backend()](pure, [*arrays, *values])
    return value, aux, gradients[: len(arrays)], gradients[len(arrays) :]


def hvp(function: Callable, variables: Sequence[keras.Variable], vectors: Sequence) -> list:
    """Return the product of a Hessian and `vectors`. The Hessian is of the scalar
    `function()` with respect to `variables`; the vectors have the variables' shapes.
    """
    values = [ops.convert_to_tensor(variable.value) for variable in variables]

    def pure(*tensors):
        with keras.StatelessScope(list(zip(variables, tensors, strict=True))):
            return function()

    return _HVP[keras.backend.backend()](pure, values, list(vectors))


def vjp(function: Callable, x) -> tuple:
    """Return `function(x)`, one tensor, and the function that maps a cotangent of its
    shape to the cotangent of x: `u -> J^T u`.
    """
    return _VJP[keras.backend.backend()](_without_side_effects(function), ops.convert_to_tensor(x))


def jvp(function: Callable, x, tangent):
    """Return `J tangent`, with the shape of `function(x)`."""
    x = ops.convert_to_tensor(x)
    return _JVP[keras.backend.backend()](
        _without_side_effects(function), x, ops.convert_to_tensor(tangent, x.dtype)
    )


def _without_side_effects(function: Callable) -> Callable:
    def pure(*arrays):
        with keras.StatelessScope():
            return function(*arrays)

    return pure


def _gradients_tensorflow(function, tensors):
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensors)
        value, aux = function(*tensors)
    return (
        value,
        aux,
        tape.gradient(value, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO),
    )


def _gradients_jax(function, tensors):
    import jax

    (value, aux), gradients = jax.value_and_grad(lambda tensors: function(*tensors), has_aux=True)(
        tensors
    )
    return value, aux, gradients


def _gradients_torch(function, tensors):
    import torch

    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        value, aux = function(*tensors)
        gradients = torch.autograd.grad(value, tensors, allow_unused=True, materialize_grads=True)
    return (
        value.detach(),
        keras.tree.map_structure(lambda tensor: tensor.detach(), aux),
        list(gradients),
    )


def _hvp_tensorflow(function, tensors, vectors):
    import tensorflow as tf

    zero = tf.UnconnectedGradients.ZERO
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(tensors)
        *_, gradients = _gradients_tensorflow(lambda *each: (function(*each), []), tensors)
    return outer.gradient(gradients, tensors, output_gradients=vectors, unconnected_gradients=zero)


def _hvp_jax(function, tensors, vectors):
    import jax

    gradient = jax.grad(lambda tensors: function(*tensors))
    return jax.jvp(gradient, (tensors,), (vectors,))[1]


def _hvp_torch(function, tensors, vectors):
    import torch

    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options = {"allow_unused": True, "materialize_grads": True}
    with torch.enable_grad(), _twice_differentiable():
        gradients = torch.autograd.grad(function(*tensors), tensors, create_graph=True, **options)
    return torch.autograd.grad(gradients, tensors, vectors, **options)


def _twice_differentiable():
    """Let torch compute attention with operations that have second derivatives. Its faster
    kernels have none.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def _vjp_tensorflow(function, x):
    import tensorflow as tf

    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = function(x)

    def pull(cotangent):
        return tape.gradient(
            y,
            x,
            output_gradients=tf.cast(cotangent, y.dtype),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    return y, pull


def _vjp_jax(function, x):
    import jax

    y, pull = jax.vjp(function, x)
    return y, lambda cotangent: pull(jax.numpy.asarray(cotangent, y.dtype))[0]


def _vjp_torch(function, x):
    import torch

    x, y = _graph_torch(function, x)

    def pull(cotangent):
        cotangent = ops.convert_to_tensor(cotangent, y.dtype)
        return torch.autograd.grad(y, x, cotangent, retain_graph=True)[0]

    return y.detach(), pull


def _graph_torch(function, x):
    import torch

    x = x.detach().clone().requires_grad_()
    with torch.enable_grad(), _twice_differentiable():
        y = function(x)
        return x, y + x[:0].sum().to(y.dtype)  # adds 0, so that y always depends on x


def _jvp_tensorflow(function, x, tangent):
    import tensorflow as tf

    # J v is the gradient of `u -> J^T u`, which is linear. TensorFlow 2.21's forward mode gives
    # wrong values through a tf.while_loop.
    zero = tf.UnconnectedGradients.ZERO
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(x)
            y = function(x)
        cotangent = tf.zeros_like(y)
        outer.watch(cotangent)
        pulled = inner.gradient(y, x, output_gradients=cotangent, unconnected_gradients=zero)
    try:
        return outer.gradient(
            pulled, cotangent, output_gradients=tangent, unconnected_gradients=zero
        )
    except NotImplementedError as error:  # tf.recompute_grad has no second derivative
        raise ValueError(
            "TensorFlow cannot compute J v of a function with rematerialisation. Received: a "
            "function with remat. Use the same weights without remat: "
            "`kp.models.unstack(model)`, or a `UnitStack` with remat=False"
        ) from error


def _jvp_jax(function, x, tangent):
    import jax

    return jax.jvp(function, (x,), (tangent,))[1]


def _jvp_torch(function, x, tangent):
    import torch

    # As on TensorFlow, because the first call of PyTorch 2.13's forward mode warns that it uses
    # the deprecated TorchScript.
    x, y = _graph_torch(function, x)
    cotangent = torch.zeros_like(y, requires_grad=True)
    [pulled] = torch.autograd.grad(y, x, cotangent, create_graph=True)
    return torch.autograd.grad(pulled, cotangent, tangent)[0]


_GRADIENTS = {"tensorflow": _gradients_tensorflow, "jax": _gradients_jax, "torch": _gradients_torch}
_HVP = {"tensorflow": _hvp_tensorflow, "jax": _hvp_jax, "torch": _hvp_torch}
_VJP = {"tensorflow": _vjp_tensorflow, "jax": _vjp_jax, "torch": _vjp_torch}
_JVP = {"tensorflow": _jvp_tensorflow, "jax": _jvp_jax, "torch": _jvp_torch}
