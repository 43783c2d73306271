"""The distribution for PyTorch: one process per device. Gradients, batch statistics and
metrics are summed over all processes.
"""

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Sequence

import keras
import numpy as np
import torch
from keras import ops
from torch import distributed
from torch._utils import _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, Step, flat
from keras_preact.layers.batch_norm import Statistics, synchronized_moments

#: Largest number of bytes to send at a time.
BUCKET_BYTES = 64 * 2**20


class MultiWorker(Distribution):
    """Each process has one device with all weights and a part of the batch."""

    def __init__(self, kind: str, devices, batch_norm: str):
        super().__init__(kind, devices, batch_norm)
        if not distributed.is_initialized():
            _join()
        self.replicas = self.processes = distributed.get_world_size()
        self.process = distributed.get_rank()

    def compile(self, model: keras.Model, **options) -> None:
        super().compile(model, **options)
        if self.replicas == 1:
            return
        for variable in model.variables:
            distributed.broadcast(variable.value.data, 0)
        model.make_train_function()
        model.make_test_function()
        model.train_function = _with_all_metrics(model, model.train_function)
        model.test_function = _with_all_metrics(model, model.test_function)
        assert self._entered is not None
        self._entered.callback(_forget_functions, model)

    def highest(self, value: int) -> int:
        highest = ops.convert_to_tensor(value, "int32")
        distributed.all_reduce(highest, distributed.ReduceOp.MAX)
        return int(highest)

    def _statistics(self) -> Statistics:
        if self.batch_norm == "per_replica":
            return Statistics()
        moments = synchronized_moments(_Sum.apply, self.replicas)
        return Statistics(moments, kernel=functools.partial(_normalize, self.replicas))

    def _check(self, model: keras.Model, options: dict) -> None:
        if options.get("jit_compile") is True:
            raise ValueError(
                "torch.compile cannot compile the exchange between processes: use "
                "jit_compile=False or 'auto'."
            )
        if not model.built:
            raise ValueError(
                "All processes start with the same weights: build the model first. Received: a "
                "model without weights"
            )

    def _step(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Step:
        """Average the gradients over all processes before the optimizer gets them, and the
        moving statistics if they differ between processes.
        """
        statistics = self._own_statistics(model)

        def step(gradients: list, variables: list) -> None:
            values = [variable.value for variable in statistics]
            means = self._whole_gradients([*gradients, *values])
            for value, mean in zip(values, means[len(gradients) :], strict=True):
                value.data.copy_(mean)
            optimizer.apply(means[: len(gradients)], variables)

        return step

    def _whole_gradients(self, gradients: Sequence) -> list:
        sums = iter(_sums([gradient for gradient in gradients if gradient is not None]))
        return [None if gradient is None else next(sums) / self.replicas for gradient in gradients]

    def _predict(self, model: keras.Model, local: np.ndarray):
        def gather(outputs):
            local_outputs = ops.convert_to_tensor(
                outputs.reshape(*local.shape[:2], *outputs.shape[1:])
            )
            all_outputs = [torch.empty_like(local_outputs) for _ in range(self.processes)]
            distributed.all_gather(all_outputs, local_outputs)
            return flat(ops.convert_to_numpy(torch.cat(all_outputs, 1)))

        return keras.tree.map_structure(gather, super()._predict(model, local))


def _with_all_metrics(model: keras.Model, function: Callable) -> Callable:
    """Return a train or test function that updates the metrics with the batches of all
    processes. The variables of metrics are sums, so their changes in a step are summed.
    """

    def step(data):
        before = {
            id(variable): variable.value.detach().clone() for variable in model.metrics_variables
        }
        function(data)
        variables = model.metrics_variables
        added = [variable.value.detach() - before.get(id(variable), 0) for variable in variables]
        for variable, total in zip(variables, _sums(added), strict=True):
            variable.assign(before.get(id(variable), 0) + total)
        return model.get_metrics_result()

    return step


def _forget_functions(model: keras.Model) -> None:
    """Make Keras build new functions, for one process."""
    model.train_function = model.test_function = None


class _Sum(torch.autograd.Function):
    """Sums a tensor over all processes. The loss of every process depends on the sum, so
    the gradients are summed too.
    """

    @staticmethod
    def forward(context, tensor):
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        return total


class _Normalize(torch.autograd.Function):
    """Batch normalisation of images, channels last, over all processes: one exchange
    forward and one backward.
    """

    @staticmethod
    def forward(context, x, gamma, beta, epsilon: float, replicas: int):
        rows = x.reshape(-1, x.shape[-1])
        count = replicas * len(rows)
        full = rows.float()
        sums = torch.stack([full.sum(0), (full * full).sum(0)])
        distributed.all_reduce(sums)
        mean, square = (sums / count).unbind()
        variance = (square - mean * mean).clamp(min=0)
        y = torch.nn.functional.batch_norm(
            x.permute(0, 3, 1, 2), mean, variance, gamma, beta, False, 0.0, epsilon
        )
        context.save_for_backward(x, gamma, mean, variance)
        context.epsilon, context.count = epsilon, count
        context.mark_non_differentiable(mean, variance)
        return y.permute(0, 2, 3, 1), mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient, *_):
        x, gamma, mean, variance = context.saved_tensors
        # for constant statistics: dy * gamma / deviation, sum of dy * x_hat, sum of dy
        images = (tensor.permute(0, 3, 1, 2) for tensor in (gradient, x))
        direct, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(
            *images, gamma, mean, variance, None, None, False, context.epsilon, [True] * 3
        )
        sums = torch.stack([grad_beta, grad_gamma])
        distributed.all_reduce(sums)
        mean_grad, mean_product = (sums / context.count).unbind()
        factor = torch.rsqrt(variance + context.epsilon)
        slope = -gamma * factor * factor * mean_product
        offset = -gamma * factor * mean_grad - slope * mean
        grad_x = direct.permute(0, 2, 3, 1) + (x * slope + offset)
        return grad_x.to(x.dtype), grad_gamma, grad_beta, None, None


def _normalize(replicas: int, x, gamma, beta, epsilon: float):
    return _Normalize.apply(x, gamma, beta, epsilon, replicas)


def _sums(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the sum over all processes of each tensor. Tensors of one type are sent
    together, up to `BUCKET_BYTES`, as torch's own `DistributedDataParallel` does.
    """
    tensors = [tensor.detach() for tensor in tensors]
    sums: list[torch.Tensor] = []
    for bucket in _take_tensors(tensors, BUCKET_BYTES):
        # not _flatten_dense_tensors: it returns a single tensor uncopied, which would be changed
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        distributed.all_reduce(flat)
        sums += _unflatten_dense_tensors(flat, bucket)
    return _reorder_tensors_as(sums, tensors)


def _join() -> None:
    """Join the other processes, for the life of this one."""
    on_gpu = torch.cuda.is_available()
    job = environment.job()
    ranks = {} if job is None else {"rank": job.process, "world_size": job.processes}
    where = "env://" if job is None else f"tcp://{job.addresses[0]}"
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo", init_method=where, **ranks)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "The processes did not find each other. Start them with torchrun, or set "
            f"{environment.VARIABLES}. Received from torch: {error}"
        ) from error
    if on_gpu:
        local = os.environ.get("LOCAL_RANK") or distributed.get_rank() % torch.cuda.device_count()
        torch.cuda.set_device(int(local))
    atexit.register(_leave)


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        if distributed.is_initialized():
            distributed.destroy_process_group()
