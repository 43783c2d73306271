"""Distributions for JAX: arrays are sharded, and one program runs on all devices."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, flat
from keras_preact.layers.batch_norm import Statistics


class DataParallel(Distribution):
    """Each device has all weights and a part of the batch. One program computes on the
    whole batch, so its statistics are synchronised without further work.
    """

    _takes_devices = True

    def __init__(self, kind: str, devices, batch_norm: str):
        super().__init__(kind, devices, batch_norm)
        self._distribution = self._make(devices)
        self.replicas = self._distribution.num_model_replicas
        self.processes, self.process = jax.process_count(), jax.process_index()

    def _make(self, devices) -> Any:
        return keras.distribution.DataParallel(devices=_devices(devices), auto_shard_dataset=False)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._distribution.scope())

    def _statistics(self) -> Statistics:
        return Statistics(groups=self.replicas if self.batch_norm == "per_replica" else 1)

    def _check(self, model: keras.Model, options: dict) -> None:
        mesh = set(self._distribution.device_mesh.backend_mesh.devices.flat)
        outside = [
            variable.path
            for variable in model.variables
            if variable.value.sharding.device_set != mesh
        ]
        if outside:
            raise ValueError(
                "Make the model inside `with distribution:`. Received: a model with "
                f"{outside[0]} on other devices"
            )

    def highest(self, value: int) -> int:
        if self.processes == 1:
            return value
        return int(multihost_utils.process_allgather(np.int32(value)).max())

    def _predict(self, model: keras.Model, local: np.ndarray):
        if self.processes == 1:
            return super()._predict(model, local)
        mesh = self._distribution.device_mesh.backend_mesh
        rows, everywhere = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            for axes in (["batch"], [])
        )

        def call(trainable, non_trainable, images):
            return model.stateless_call(trainable, non_trainable, images, training=False)[0]

        # A process can read only its own parts of arrays, so every process gets all outputs.
        step = jax.jit(call, out_shardings=everywhere)
        weights = [
            [variable.value for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        ]
        outputs = [
            step(*weights, jax.make_array_from_process_local_data(rows, images)) for images in local
        ]
        return keras.tree.map_structure(lambda *parts: flat(np.stack(parts)), *outputs)


class ModelParallel(DataParallel):
    """Splits the output channels of the kernels over the devices of a row, and the
    batch over the rows.
    """

    def _make(self, devices) -> Any:
        rows = np.atleast_2d(np.array(_devices(devices)))
        mesh = keras.distribution.DeviceMesh(rows.shape, ["batch", "model"], rows)
        return _OutputChannels(
            layout_map=keras.distribution.LayoutMap(mesh), auto_shard_dataset=False
        )


class _OutputChannels(keras.distribution.ModelParallel):
    """Splits each kernel, also of a stack, along its last axis if its size is a multiple
    of the devices in a row. All other variables are on all devices.
    """

    def get_variable_layout(self, variable) -> keras.distribution.TensorLayout:
        layout = super().get_variable_layout(variable)
        parts = self.device_mesh.shape[1]
        is_kernel = variable.path.rsplit("/", 1)[-1] == "kernel"
        if is_kernel and not any(layout.axes) and variable.shape[-1] % parts == 0:
            axes = [None] * (len(variable.shape) - 1)
            return keras.distribution.TensorLayout([*axes, "model"], self.device_mesh)
        return layout


class MultiWorker(DataParallel):
    """`DataParallel` over the devices of all processes."""

    _takes_devices = False

    def __init__(self, kind: str, devices, batch_norm: str):
        if not jax.distributed.is_initialized():
            try:
                keras.distribution.initialize()
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    "The processes did not find each other. Start the distribution before "
                    "anything uses JAX, under a launcher that JAX knows (SLURM, Kubernetes, "
                    f"MPI), or set {environment.VARIABLES}. Received from JAX: {error}"
                ) from error
        super().__init__(kind, devices, batch_norm)

    def _statistics(self) -> Statistics:
        if self.batch_norm == "per_replica":
            return super()._statistics()
        return Statistics(kernel=_normalize(self._distribution.device_mesh.backend_mesh))


def _normalize(mesh: jax.sharding.Mesh) -> Callable:
    """Return a batch normalisation of images, channels last, over the devices of a mesh.

    It needs one exchange forward and one backward. XLA by itself needs two each, and
    sends the sums of an exchange separately.
    """
    rows, whole = jax.sharding.PartitionSpec(*mesh.axis_names), jax.sharding.PartitionSpec()
    axes = (0, 1, 2)

    def on_devices(function: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def mean_over_all(*values):
        n = mesh.size
        return jax.lax.psum(jnp.stack(values), mesh.axis_names) / n

    def forward(x, gamma, beta, epsilon):
        full = x.astype("float32")
        mean, square = mean_over_all(full.mean(axes), (full * full).mean(axes))
        variance = jnp.maximum(square - mean * mean, 0.0)
        scale = gamma * jax.lax.rsqrt(variance + epsilon)
        return (full * scale + (beta - mean * scale)).astype(x.dtype), mean, variance

    def backward(x, gamma, mean, variance, epsilon, grad_y):
        factor = jax.lax.rsqrt(variance + epsilon)
        full = grad_y.astype("float32")
        normal = (x.astype("float32") - mean) * factor
        mean_grad, mean_product = mean_over_all(full.mean(axes), (full * normal).mean(axes))
        grad_x = gamma * factor * (full - mean_grad - normal * mean_product)
        count = mesh.size * (x.size // x.shape[-1])
        return grad_x.astype(x.dtype), count * mean_product, count * mean_grad

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def normalize(x, gamma, beta, epsilon):
        step = functools.partial(forward, epsilon=epsilon)
        return on_devices(step, (rows, whole, whole), (rows, whole, whole))(x, gamma, beta)

    def keep(x, gamma, beta, epsilon):
        y, mean, variance = normalize(x, gamma, beta, epsilon)
        return (y, mean, variance), (x, gamma, mean, variance)

    def gradient(epsilon, residuals, grad_outputs):
        step = on_devices(
            lambda x, gamma, mean, variance, grad_y: backward(
                x, gamma, mean, variance, epsilon, grad_y
            ),
            (rows, whole, whole, whole, rows),
            (rows, whole, whole),
        )
        return step(*residuals, grad_outputs[0])

    normalize.defvjp(keep, gradient)
    return normalize


def _devices(devices) -> list:
    """Return `devices`, or all devices for None: first the devices of process 0."""
    return keras.distribution.list_devices() if devices is None else devices
