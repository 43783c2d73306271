"""What the scripts decide by backend (does XLA compile, who gets the accelerator), what
they run on, what memory they take.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any


def jit_compile(choice: str) -> bool | str:
    """Turn `auto`, `on` or `off` into the argument of `model.compile`."""
    import keras

    if choice != "auto":
        return choice == "on"
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # On a CPU, XLA's convolutions are slower than TensorFlow's own: ResNet-20, batch 128, two
        # cores, 161 and 323 images/s.
        if not tf.config.list_physical_devices("GPU"):
            return False
    return choice


def compiled(function: Callable) -> Callable:
    """Return a pure function of tensors as the backend compiles it. Nothing is kept for
    gradients.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(function)
    if backend == "torch":
        import torch

        return torch.no_grad()(function)
    import tensorflow as tf

    return tf.function(function)


def keep_accelerator_for_backend(backend: str) -> None:
    """Keep TensorFlow, which most scripts import whatever the backend, from taking the
    GPU's memory, where it is installed.
    """
    if backend != "tensorflow":
        with contextlib.suppress(ModuleNotFoundError):
            import tensorflow as tf

            tf.config.set_visible_devices([], "GPU")


def device() -> str:
    """Return the name of the device that Keras' backend computes on, such as `NVIDIA
    H200`, or `CPU`.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        first = jax.devices()[0]
        return "CPU" if first.platform == "cpu" else first.device_kind
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return (
        tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
        if gpus
        else "CPU"
    )


def described(*packages: str) -> dict[str, Any]:
    """Return what a file of results says of the device: its name, the CPU, the backend,
    and the versions of Keras, NumPy, the backend and these packages.
    """
    import keras

    backend = keras.backend.backend()
    return {
        "name": device(),
        "cpu": cpu(),
        "backend": backend,
        "versions": versions(*packages, "keras", "numpy", backend),
    }


def cpu() -> str:
    """Return the processor's model, and how many of its cores the machine shows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def machine(variables: Iterable[str]) -> dict[str, Any]:
    """Return what a benchmark's file says of the machine, with those of these
    environment variables that are set.
    """
    return {
        "cpu": cpu(),
        "usable_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.platform(),
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }


def peak_resident() -> int:
    """Return the most bytes of memory that this process has had, as far back as the
    system tells.
    """
    # ru_maxrss of a child starts at the peak of the process that started it, VmHWM does not
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return _status("VmRSS") or peak_resident()


def _status(key: str) -> int | None:
    """Return a size of this process in bytes from Linux' /proc, None elsewhere."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else []:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those of these packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
