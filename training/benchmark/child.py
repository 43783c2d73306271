"""Measures one candidate in this process, which the benchmark starts for it.

JOB is a `Job` as JSON, the result one line of JSON on stdout. Keras' backend is that of
the environment's KERAS_BACKEND.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import backends, children
from ..config import Checkpoint
from . import candidates, subjects


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child is to measure.

    Args:
        command: compile, step, memory, optimizer, health or checkpoint.
        name: The network, and `options` of its candidate.
        batch: Images at a time, of `image_size` or the network's own.
        dtype: Keras' policy; of a torch module, autocast.
        jit_compile: auto, on or off.
        mode: train or inference.
        steps: How many are timed, behind `warmup` others.
        interval: Of health: steps between two records.
    """

    command: str
    name: str
    options: Mapping[str, Any]
    batch: int
    image_size: int | None
    dtype: str
    jit_compile: str
    mode: str
    steps: int
    warmup: int
    interval: int = 100


def measure(job: Job) -> dict:
    """Return the figures of a job: seconds, images in a second, bytes."""
    import keras

    backends.keep_accelerator_for_backend(keras.backend.backend())
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(job.dtype)
    subject, build_seconds = _timed(lambda: subjects.make(job))
    figures = {"build_seconds": build_seconds} | MEASUREMENTS[job.command](subject, job)
    return {
        "figures": figures,
        "device": backends.device(),
        "jit_compile": subject.jit_compile,
        "parameters": subject.parameters,
        "versions": _versions(keras.backend.backend(), job.name),
    }


def _compile(subject: subjects.Subject, job: Job) -> dict:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            empty  # torch.compile would take what an earlier round has compiled
        )
        _, first = _timed(subject.train_step)
        steps = [_timed(subject.train_step)[1] for _ in range(job.steps)]
    step = statistics.median(steps)
    return {
        "first_step_seconds": first,
        "step_seconds": step,
        "compile_seconds": first - step,
        "all_steps": steps,
    }


def _step(subject: subjects.Subject, job: Job) -> dict:
    step = subject.train_step if job.mode == "train" else subject.inference_step
    for _ in range(job.warmup):
        step()
    steps = [_timed(step)[1] for _ in range(job.steps)]
    seconds = statistics.median(steps)
    return {"step_seconds": seconds, "images_per_second": job.batch / seconds, "all_steps": steps}


def _optimizer(subject: subjects.Subject, job: Job) -> dict:
    update = subject.updates()
    _, first = _timed(update)
    for _ in range(job.warmup - 1):
        update()
    steps = [_timed(update)[1] for _ in range(job.steps)]
    return {
        "variables": subject.variables,
        "first_update_seconds": first,
        "update_seconds": statistics.median(steps),
        "all_steps": steps,
    }


def _memory(subject: subjects.Subject, job: Job) -> dict:
    step, temporary = subject.analysed_step()
    before = backends.resident()
    _forget_peak()
    for _ in range(job.steps):
        step()
    peak = backends.peak_resident()
    figures = {
        "xla_temporary_bytes": temporary,
        "resident_increase_bytes": max(peak - before, 0),
        "peak_resident_bytes": peak,
        "device_peak_bytes": subjects.peak_on_device(),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _health(subject: subjects.Subject, job: Job) -> dict:
    """In turn without the callback and with it, so that a machine that gets slower
    slows both.
    """
    pairs = [subject.fits(job.steps, job.warmup, job.interval) for _ in range(HEALTH_PAIRS)]
    plain, watched = zip(*pairs, strict=True)
    return {
        "step_seconds": statistics.median(plain),
        "watched_step_seconds": statistics.median(watched),
        "watched_over_plain": statistics.median(with_it / without for without, with_it in pairs),
        "all_steps": [list(pair) for pair in pairs],
    }


def _checkpoint(subject: subjects.Subject, job: Job) -> dict:
    saving, restoring, size = subject.saves(job.steps)
    save = statistics.median(saving)
    return {
        "save_seconds": save,
        "restore_seconds": statistics.median(restoring),
        "bytes": size,
        "share_of_time": save / (save + 60 * Checkpoint().minutes),
        "all_saves": saving,
    }


#: How often a child measures `fit` without the callback and then with it.
HEALTH_PAIRS = 2

MEASUREMENTS: Mapping[str, Callable[[subjects.Subject, Job], dict]] = {
    "compile": _compile,
    "step": _step,
    "memory": _memory,
    "optimizer": _optimizer,
    "health": _health,
    "checkpoint": _checkpoint,
}


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def _forget_peak() -> None:
    """Let the peak start from what is resident now, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _versions(backend: str, name: str) -> dict[str, str]:
    packages = ["keras-preact", "keras", "numpy", backend]
    peer = candidates.PEERS.get(name)
    if peer is not None and peer.package is not None:
        packages.append(peer.package[1])
    return backends.versions(*packages)


def main(argv: list[str]) -> None:
    children.answer(lambda: measure(Job(**json.loads(argv[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
