"""Environment variables, set by launchers, with which processes find each other.

Keras' variables work on all backends: KERAS_DISTRIBUTION_JOB_ADDRESSES
(`host:port,host:port`), KERAS_DISTRIBUTION_NUM_PROCESSES and
KERAS_DISTRIBUTION_PROCESS_ID. Without them each framework reads other variables. JAX
reads the variables of SLURM, Kubernetes, MPI or a cloud, TensorFlow reads TF_CONFIG, and
torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun).
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras

ADDRESSES, PROCESSES, PROCESS = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)
#: Names of the variables, for messages.
VARIABLES = f"{ADDRESSES}, {PROCESSES} and {PROCESS}"


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that Keras' variables describe.

    Args:
        addresses: `host:port` of each process, or only of the first one.
        processes: Number of processes.
        process: Number of this process, from 0.
    """

    addresses: tuple[str, ...]
    processes: int
    process: int


def job() -> Job | None:
    """Return the job that Keras' variables describe, or None if none of them is set.

    Raises:
        ValueError: if some are missing, or do not fit together.
    """
    values = {
        name: os.environ[name] for name in (ADDRESSES, PROCESSES, PROCESS) if os.environ.get(name)
    }
    if not values:
        return None
    try:
        addresses = tuple(address.strip() for address in values[ADDRESSES].split(","))
        parsed = Job(addresses, int(values.get(PROCESSES, len(addresses))), int(values[PROCESS]))
    except (KeyError, ValueError):
        parsed = None
    if (
        parsed is None
        or len(parsed.addresses) not in (1, parsed.processes)
        or not 0 <= parsed.process < parsed.processes
    ):
        raise ValueError(
            f"{ADDRESSES} must be host:port of every process, separated by commas, {PROCESSES} "
            f"the number of processes, and {PROCESS} the number of this process, from 0. Received: "
            f"{', '.join(f'{name}={value}' for name, value in values.items())}"
        )
    return parsed


def _tensorflow() -> int | None:
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    return sum(len(cluster.get(role, ())) for role in ("chief", "worker")) or None


def _torch() -> int | None:
    return int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE") else None


#: Functions by backend: the number of processes that the framework's own variables announce.
_ANNOUNCED: Mapping[str, Callable[[], int | None]] = MappingProxyType(
    {"tensorflow": _tensorflow, "torch": _torch}
)


def check_processes(processes: int) -> None:
    """Check that the environment announces `processes` processes.

    Raises:
        ValueError: otherwise, since each process would silently train its own model.
    """
    keras_job = job()
    announced = (
        keras_job.processes
        if keras_job
        else _ANNOUNCED.get(keras.backend.backend(), lambda: None)()
    )
    if announced not in (None, processes):
        raise ValueError(
            f"The environment announces {announced} processes, but the number of processes that "
            f"train together is {processes}. Use kind='multi_worker' and start it before the "
            "backend is used, or remove the launcher's variables from the environment."
        )
