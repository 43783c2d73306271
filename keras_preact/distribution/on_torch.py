"""PyTorch: one process a device, whose gradients, batch statistics and metrics are
summed over all processes.
"""

import atexit
import contextlib
import os

import keras
import numpy as np
import torch
from keras import ops
from torch import distributed

from keras_preact import _batch_norm
from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, flat, is_statistic

#: What is sent at a time.
BUCKET_BYTES = 64 * 2**20


class MultiWorker(Distribution):
    """Each process has one device with all weights and a part of the batch."""

    def __init__(self, kind: str, devices, batch_norm: str):
        super().__init__(kind, devices, batch_norm)
        if not distributed.is_initialized():
            _join()
        self.replicas = self.processes = distributed.get_world_size()
        self.process = distributed.get_rank()

    def _statistics(self) -> _batch_norm.Statistics:
        if self.batch_norm == "per_replica":
            return _batch_norm.Statistics()
        return _batch_norm.Statistics(_batch_norm.synchronized_moments(_Sum.apply, self.replicas))

    def _check(self, model: keras.Model, options: dict) -> None:
        if options.get("jit_compile") is True:
            raise ValueError(
                "torch.compile does not take what processes exchange: use jit_compile=False or "
                "'auto'."
            )
        if not model.built:
            raise ValueError(
                "All processes begin with the same weights: build the model first. Received: one "
                "without weights"
            )

    def _prepare(self, model: keras.Model) -> None:
        optimizer = model.optimizer if model.compiled else None
        if self.replicas == 1 or optimizer is None or "apply" in vars(optimizer):
            return
        averaged = [variable for variable in model.variables if is_statistic(variable)]

        def apply(gradients, variables=None):
            """Average the gradients, and statistics that each process has of its own,
            before the optimizer sees them.
            """
            gradients = list(gradients)
            present = [gradient for gradient in gradients if gradient is not None]
            statistics = (
                [variable.value for variable in averaged]
                if self.batch_norm == "per_replica"
                else []
            )
            means = iter(_means([*present, *statistics], self.replicas))
            gradients = [None if gradient is None else next(means) for gradient in gradients]
            for value, mean in zip(statistics, means, strict=True):
                value.data.copy_(mean)
            return type(optimizer).apply(optimizer, gradients, variables)

        def get_metrics_result():
            """The results of all processes' batches: a metric's variables are sums."""
            variables = [variable for metric in model.metrics for variable in metric.variables]
            own = [variable.value.detach().clone() for variable in variables]
            for variable, total in zip(variables, _sums(own), strict=True):
                variable.assign(total)
            try:
                return type(model).get_metrics_result(model)
            finally:
                for variable, value in zip(variables, own, strict=True):
                    variable.assign(value)

        for variable in model.variables:
            distributed.broadcast(variable.value.data, 0)
        self._override(optimizer, "apply", apply)
        self._override(model, "get_metrics_result", get_metrics_result)

    def _predict(self, model: keras.Model, local: np.ndarray):
        def gather(outputs):
            own = ops.convert_to_tensor(outputs.reshape(*local.shape[:2], *outputs.shape[1:]))
            parts = [torch.empty_like(own) for _ in range(self.processes)]
            distributed.all_gather(parts, own)
            return flat(ops.convert_to_numpy(torch.cat(parts, 1)))

        return keras.tree.map_structure(gather, super()._predict(model, local))


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes. Each of them has a loss of its own, all
    of which it is a part of.
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


def _sums(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum over all processes of each tensor, sent together with others of
    its type.
    """
    sums: list = [None] * len(tensors)
    for bucket in _buckets(tensors):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in bucket])
        distributed.all_reduce(flat)
        for i, part in zip(bucket, flat.split([tensors[i].numel() for i in bucket]), strict=True):
            sums[i] = part.view(tensors[i].shape)
    return sums


def _means(tensors: list[torch.Tensor], processes: int) -> list[torch.Tensor]:
    return [total / processes for total in _sums(tensors)]


def _buckets(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Return indices of tensors of one type, together up to `BUCKET_BYTES` or a single
    one above it.
    """
    full: list[list[int]] = []
    open_: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        bucket, size = open_.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            full.append(bucket)
            bucket, size = [], 0
        open_[tensor.dtype] = ([*bucket, i], size + tensor.nbytes)
    return full + [bucket for bucket, _ in open_.values()]


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
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and "
            f"KERAS_DISTRIBUTION_PROCESS_ID. Received from torch: {error}"
        ) from error
    if on_gpu:
        local = os.environ.get("LOCAL_RANK") or distributed.get_rank() % torch.cuda.device_count()
        torch.cuda.set_device(int(local))
    atexit.register(_leave)


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        if distributed.is_initialized():
            distributed.destroy_process_group()
