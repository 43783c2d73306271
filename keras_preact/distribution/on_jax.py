"""JAX: arrays that lie on several devices, and compiled programs over all of them."""

import contextlib
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, flat
from keras_preact.layers.batch_norm import Statistics


class DataParallel(Distribution):
    """All weights on each device, a part of the batch on each. One program computes on
    the whole batch, so its statistics are synchronised without further work.
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
                "Make the model inside of `with distribution:`. Received: a model with "
                f"{outside[0]} elsewhere"
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

        # A process can read only what it holds, so every process gets all outputs.
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
    """Splits each kernel, also of a stack, over its last axis if that divides. All
    other variables are on all devices.
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


def _devices(devices) -> list:
    """Return `devices`, or all: those of process 0 first."""
    return keras.distribution.list_devices() if devices is None else devices
