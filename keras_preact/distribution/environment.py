"""How processes find each other: by the variables that launchers set.

Keras' variables work on all backends: KERAS_DISTRIBUTION_JOB_ADDRESSES
(`host:port,host:port`), KERAS_DISTRIBUTION_NUM_PROCESSES and
KERAS_DISTRIBUTION_PROCESS_ID. Without them each framework looks for its own: JAX for
the variables of SLURM, Kubernetes, MPI or a cloud, TensorFlow for TF_CONFIG, torch for
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun).
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
#: For messages.
VARIABLES = f"{ADDRESSES}, {PROCESSES} and {PROCESS}"


@dataclasses.dataclass(frozen=True)
class Job:
    """What Keras' variables say.

    Args:
        addresses: `host:port` of each process, or of the first alone.
        processes: Number of processes.
        process: Number of this process, from 0.
    """

    addresses: tuple[str, ...]
    processes: int
    process: int


def job() -> Job | None:
    """Return what Keras' variables say, or None if none of them is set.

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
        found = Job(addresses, int(values.get(PROCESSES, len(addresses))), int(values[PROCESS]))
    except (KeyError, ValueError):
        found = None
    if (
        found is None
        or len(found.addresses) not in (1, found.processes)
        or not 0 <= found.process < found.processes
    ):
        raise ValueError(
            f"{ADDRESSES} must be host:port of every process, separated by commas, {PROCESSES} "
            f"their number and {PROCESS} that of this one, from 0. Received: "
            f"{', '.join(f'{name}={value}' for name, value in values.items())}"
        )
    return found


def _tensorflow() -> int | None:
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    return sum(len(cluster.get(role, ())) for role in ("chief", "worker")) or None


def _torch() -> int | None:
    return int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE") else None


#: Backend to the number of processes that the framework's own variables announce.
_OWN: Mapping[str, Callable[[], int | None]] = MappingProxyType(
    {"tensorflow": _tensorflow, "torch": _torch}
)


def check_processes(processes: int) -> None:
    """Check that as many processes train together as the environment announces.

    Raises:
        ValueError: otherwise. Each process would silently train a model of its own.
    """
    given = job()
    announced = given.processes if given else _OWN.get(keras.backend.backend(), lambda: None)()
    if announced not in (None, processes):
        raise ValueError(
            f"The environment announces {announced} processes that train together, and "
            f"{processes} do: use kind='multi_worker', started before the backend is used, or "
            "clear the environment of the launcher's variables."
        )
