"""Choices that depend on the backend (XLA, precision), and descriptions of the device and
of the memory in use.
"""

import contextlib
import functools
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any


def jit_compile(choice: str, model) -> bool | str:
    """Turn `auto`, `on` or `off` into the argument of `model.compile`. For `auto`, the
    networks of this package choose by themselves; other Keras models get the same here.
    """
    from keras_preact.backend import devices
    from keras_preact.models.base import UnitNetwork

    if choice != "auto":
        return choice == "on"
    is_slower = not isinstance(model, UnitNetwork) and devices.xla_is_slower()
    return False if is_slower else "auto"


#: Flags of CPUs on which TensorFlow and PyTorch train faster in bfloat16.
_BFLOAT16 = ("amx_bf16", "avx512_bf16")
#: First compute capability of NVIDIA's GPUs with bfloat16 (Ampere).
_AMPERE = 8


def faster_policy() -> tuple[str, str]:
    """Return the dtype policy that trains faster on the device of Keras' backend,
    `mixed_bfloat16` or `float32`, and why.
    """
    import keras

    backend, name = keras.backend.backend(), device()
    if name != "CPU":
        if _accelerator_has_bfloat16(backend):
            return "mixed_bfloat16", f"{name} computes in bfloat16"
        return "float32", f"{name} does not compute in bfloat16"
    if backend == "jax":  # ResNet-20, batch 128: 230 images/s in float32, 222 in bfloat16
        return "float32", "JAX is not faster in bfloat16 on a CPU"
    flag = next((flag for flag in _BFLOAT16 if flag in cpu_flags()), None)
    if flag is None:
        return "float32", "this CPU has no bfloat16 instructions"
    return "mixed_bfloat16", f"this CPU has {flag}"


def _accelerator_has_bfloat16(backend: str) -> bool:
    if backend == "tensorflow":
        import tensorflow as tf

        gpu = tf.config.list_physical_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(gpu)
        return details.get("compute_capability", (0, 0))[0] >= _AMPERE
    if backend == "jax":
        import jax

        first = jax.devices()[0]
        major = str(getattr(first, "compute_capability", "")).partition(".")[0]
        return first.platform == "tpu" or (major.isdigit() and int(major) >= _AMPERE)
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


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
    """Return the description of the device for a file of results: its name, the CPU, the
    backend, and the versions of Keras, NumPy, the backend and these packages.
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
    """Return the processor's model and the number of its cores."""
    name = _line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def cpu_flags() -> list[str]:
    """Return the CPU's flags for matrices and 16 bits, such as amx_bf16; none if the
    system does not list them.
    """
    return sorted(
        flag
        for flag in _line("/proc/cpuinfo", "flags").split()
        if flag.startswith("amx_") or flag in ("avx2", "avx512f", "avx512_bf16")
    )


def instructions() -> str:
    """Return the processor and all of its instruction sets, as the system names them."""
    flags = _line("/proc/cpuinfo", "flags") or _line("/proc/cpuinfo", "Features")
    return f"{platform.machine()} {cpu()} {flags}"


def machine(variables: Iterable[str]) -> dict[str, Any]:
    """Return the description of the machine for a benchmark's file, with the values of
    these environment variables if they are set.
    """
    return {
        "cpu": cpu(),
        "flags": cpu_flags(),
        "usable_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.platform(),
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }


def peak_resident() -> int:
    """Return the peak memory of this process in bytes, as reported by the system."""
    # ru_maxrss of a child starts at the peak of its parent process, VmHWM does not
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def peak_on_device() -> int | None:
    """Return the peak GPU memory of the backend's arrays in bytes, None without a GPU."""
    import keras

    backend = keras.backend.backend()
    if device() == "CPU":
        return None
    if backend == "jax":
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated()
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def resident() -> int:
    """Return the memory of this process in bytes."""
    return _status("VmRSS") or peak_resident()


def _status(key: str) -> int | None:
    """Return a size of this process in bytes from Linux' /proc, None elsewhere."""
    size = _line("/proc/self/status", key)
    return int(size.split()[0]) * 1024 if size else None


def _line(file: str, key: str) -> str:
    """Return the text after `KEY:` in a file, an empty string if there is no such line."""
    path = Path(file)
    for line in path.read_text().splitlines() if path.is_file() else []:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of these packages, if they are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


@functools.cache
def code() -> dict[str, Any]:
    """Return the git `commit` of this code, None if it is unknown, and whether the code
    was `modified` since.
    """

    file = Path(__file__).resolve()  # a link to the package is in no repository

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(file.parents[1]), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        if not git("ls-files", "--", str(file)):  # installed inside another repository
            return {"commit": None, "modified": False}
        changes = git(
            "status", "--porcelain", "--untracked-files=no", "--", "keras_preact", "training"
        )
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": False}
