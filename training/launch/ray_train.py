r"""Train with several processes. Ray starts them on one machine or a cluster, and
restarts them if one fails.

    python -m training.launch.ray_train --workers 4 --gpus 1 --output /shared/run \
        -- cifar10 --batch-size 512

After `--` come a recipe and its options, as for `keras-preact train`. KERAS_BACKEND
chooses tensorflow, jax or torch.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from .. import cli
from ..cli import values
from ..errors import UserError


def launch(
    recipe: tyro.conf.Positional[tuple[str, ...]],
    output: Path,
    workers: int = 2,
    cpus: int = 1,
    gpus: int = 0,
    restarts: int = 10,
) -> None:
    """Train with Ray: ray_train --output DIRECTORY [OPTIONS] -- RECIPE [OPTIONS]

    Args:
        recipe: After --, the recipe and its options, as for `keras-preact train`.
        output: Run directory, on a disk that all machines share. An existing run is
            resumed.
        workers: Number of processes that train together.
        cpus: Cores per process.
        gpus: GPUs per process.
        restarts: Largest number of restarts of all processes after one fails. Announced
            pre-emptions do not count.

    Raises:
        UserError: if Ray is not installed.
        SystemExit: with status 2, for a mistake in the recipe's options.
        ray.train.TrainingFailedError: if the training fails more than `restarts` times.
    """
    try:
        from ray import train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError as error:
        raise UserError(
            f'training.launch.ray_train needs Ray: pip install "ray[train]". ({error})'
        ) from error

    output = output.resolve()
    trainer = DataParallelTrainer(
        train_in_worker,
        train_loop_config={
            "argv": [*recipe, "--distribution", "multi_worker", "--output", str(output), "--resume"]
        },
        backend_config=_keras_variables(),
        scaling_config=train.ScalingConfig(
            num_workers=workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": cpus} | ({"GPU": gpus} if gpus else {}),
        ),
        run_config=train.RunConfig(
            name=f"{output.name}-ray",
            storage_path=str(output.parent),
            failure_config=train.FailureConfig(max_failures=restarts),
            worker_runtime_env={"env_vars": _environment()},
        ),
    )
    if status := trainer.fit().return_value:
        sys.exit(status)


def train_in_worker(config: dict) -> int:
    """Train with the arguments `config["argv"]`, and return 0, or 2 for a mistake that
    a restart cannot correct.

    Raises:
        RuntimeError: for any other status; Ray then restarts the processes.
    """
    from ..commands import train  # not before: it reads KERAS_BACKEND

    try:
        train.main(config["argv"])
    except SystemExit as ended:
        if ended.code == 2:
            return 2
        raise RuntimeError(f"The training ended with status {ended.code}.") from ended
    return 0


def _environment() -> dict[str, str]:
    """Return the environment variables with which workers start, on all machines."""
    return {
        "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "tensorflow"),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # the patch shows every line twice
    }


def _keras_variables():
    """Return a configuration with which Ray sets Keras' variables in its workers.
    `kp.distribution` reads them to find the processes.

    Each of Ray's own trainers sets the variables of one framework. Its JaxTrainer sets
    none without a GPU or a TPU.
    """
    from ray.train.backend import Backend, BackendConfig

    class KerasVariables(Backend):
        def on_start(self, worker_group, backend_config):
            addresses = worker_group.execute(_free_address)
            for process in range(len(addresses)):
                worker_group.execute_single(process, _set_variables, addresses, process)

    class Config(BackendConfig):
        backend_cls = KerasVariables

    return Config()


def _free_address() -> str:
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def _set_variables(addresses: Sequence[str], process: int) -> None:
    os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"] = ",".join(addresses)
    os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = str(len(addresses))
    os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(process)


def main(argv: Sequence[str] | None = None) -> None:
    cli.guard(lambda: values.parse(launch, args=argv))


if __name__ == "__main__":
    main()
