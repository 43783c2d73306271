"""The measured figures of docs/benchmarks.md: which ones, in what words. Numbers come
from training/benchmark/measured/.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

#: Columns of every table.
HEAD = ["measured", "median", "least to most", "rounds", "CPU", "cores, threads", "file"]

MEASURED = Path(__file__).parents[2] / "training/benchmark/measured"


class Row(NamedTuple):
    """A figure of a file.

    `over` is None for the figure itself; else the table shows its ratio to the
    baseline, which `over` names.
    """

    what: str
    file: str
    candidate: str
    figure: str
    over: str | None = None
    digits: int = 2


def _backends(
    what: str,
    file: str,
    candidate: str,
    figure: str,
    over: str | None = None,
    digits: int = 2,
    **names: str,
):
    """One row for each backend, in the order given: its key in the file to the words
    for it.
    """
    return [
        Row(f"{what}, {words}", file, f"{key}/{candidate}", figure, over, digits)
        for key, words in names.items()
    ]


NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
_R1001, _R164, _STACKED = "cifar_resnet1001_preact", "cifar_resnet164_preact", "stacked=true"
_LOOP = "a float32 loop over keras.applications' ResNet50V2"
_DIRECT, _SERVER = "direct/imagenet_resnet50_preact", "server/imagenet_resnet50_preact"

#: Heading to its rows.
TABLES: dict[str, list[Row]] = {
    "Compiling": [
        *_backends(
            "First train step of ResNet-1001, batch 8, seconds",
            "compile_stacked",
            f"{_R1001}:{_STACKED}",
            "first_step_seconds",
            digits=1,
            tensorflow="TensorFlow",
            jax="JAX",
        ),
        *_backends(
            "Time to compile ResNet-1001",
            "compile_stacked",
            f"{_R1001}:{_STACKED}",
            "compile_seconds",
            "ResNet-164",
            tensorflow="TensorFlow",
            jax="JAX",
        ),
    ],
    "Training": [
        *_backends(
            "Train step of ResNet-164, batch 16, stacked",
            "step_resnet164",
            f"{_R164}:{_STACKED}",
            "step_seconds",
            "single units",
            **NAMES,
        ),
        *_backends(
            "Update by the optimiser alone, ResNet-164, stacked",
            "optimizer_resnet164",
            f"{_R164}:{_STACKED}",
            "update_seconds",
            "single units",
            **NAMES,
        ),
        Row(
            "Train step of ResNet-50, batch 8, TensorFlow",
            "step_resnet50",
            "tensorflow/imagenet_resnet50_preact",
            "step_seconds",
            "keras.applications' ResNet50V2",
        ),
        Row(
            "Inference of ResNet-50, batch 8, TensorFlow",
            "inference_resnet50",
            "tensorflow/imagenet_resnet50_preact",
            "step_seconds",
            "keras.applications' ResNet50V2",
        ),
        *_backends(
            "Step of `fit` with `kp.TrainingHealth`, relative to one without, ResNet-20, batch 32",
            "health_resnet20",
            "cifar_resnet20_preact",
            "watched_over_plain",
            **NAMES,
        ),
    ],
    "Memory": [
        Row(
            "Train step of ResNet-1001, `remat=5`, JAX (XLA's analysis)",
            "memory_resnet1001",
            f"jax/{_R1001}:{_STACKED},remat=5",
            "xla_temporary_bytes",
            "no remat",
            3,
        ),
        Row(
            "the same, torch (growth of the process)",
            "memory_resnet1001",
            f"torch/{_R1001}:{_STACKED},remat=5",
            "resident_increase_bytes",
            "no remat",
            3,
        ),
        Row(
            "the same, TensorFlow (growth of the process, tracing included)",
            "memory_resnet1001",
            f"tensorflow/{_R1001}:{_STACKED},remat=5",
            "resident_increase_bytes",
            "no remat",
            3,
        ),
    ],
    "Input and import": [
        Row(
            "CIFAR input, images/s",
            "input_cifar",
            "stream",
            "images_per_second",
            "a tf.data map over single images",
        ),
        Row(
            "its batches alone, images/s",
            "input_cifar",
            "batches",
            "images_per_second",
            "a tf.data map over single images",
        ),
        Row(
            "CIFAR input through `model.fit` with one small layer, images/s",
            "input_cifar",
            "fit",
            "images_per_second",
            digits=0,
        ),
        *_backends(
            "`import keras_preact`",
            "import",
            "keras_preact",
            "wall_seconds",
            "`import keras`",
            3,
            **NAMES,
        ),
    ],
    "Serving": [
        *(
            Row(
                f"ResNet-50, {engine} engine, {precision}, batch {batch}, images/s",
                "serving",
                f"{_DIRECT}/{engine.lower()}:precision={precision},batch={batch}",
                "images_per_second",
                _LOOP,
            )
            for engine, precision in (
                ("TensorFlow", "bfloat16"),
                ("OpenVINO", "bfloat16"),
                ("TensorFlow", "float32"),
            )
            for batch in (1, 32)
        ),
        *(
            Row(
                f"ResNet-50, 16 clients, {engine}: requests/s with batching, relative to without",
                "serving",
                f"{_SERVER}/{engine.lower()}:batching=on,concurrency=16",
                "over_no_batching",
            )
            for engine in ("TensorFlow", "OpenVINO")
        ),
        Row(
            "ResNet-50, 16 clients, OpenVINO, requests/s",
            "serving",
            f"{_SERVER}/openvino:batching=on,concurrency=16",
            "requests_per_second",
            digits=1,
        ),
        Row(
            "99th percentile of their latency, ms",
            "serving",
            f"{_SERVER}/openvino:batching=on,concurrency=16",
            "p99_ms",
            digits=1,
        ),
        Row(
            "CIFAR ResNet-20, 64 clients, OpenVINO, requests/s",
            "serving",
            "server/cifar_resnet20_preact/openvino:batching=on,concurrency=64",
            "requests_per_second",
            digits=0,
        ),
        Row(
            "Growth of the server's memory over 10,000 requests, TensorFlow, %",
            "serving",
            "memory/cifar_resnet20_preact/tensorflow:concurrency=16",
            "growth_percent",
        ),
    ],
}


def read(file: str) -> dict:
    return json.loads((MEASURED / f"{file}.json").read_text())


def summary(row: Row, content: dict) -> dict:
    """Return median, least and most of a row's figure or of its ratio, and the number
    of rounds.
    """
    found = content["summary"][row.candidate][row.figure]
    return (found["ratio"] if row.over else found) | {"rounds": found["rounds"]}


def threads(machine: dict) -> str:
    """Return the cores that a file records, and the limit on threads."""
    if "environment" not in machine:
        limit = "limit not recorded"
    else:
        limits = {
            name: value for name, value in machine["environment"].items() if "THREADS" in name
        }
        limit = ", ".join(f"`{name}={value}`" for name, value in limits.items()) or "no limit"
    return (
        f"{machine['usable_cores']} {'core' if machine['usable_cores'] == 1 else 'cores'}, {limit}"
    )


def cpu(machine: dict) -> str:
    """Return the processor that a file records, with the instructions that 16-bit
    networks profit from.
    """
    name = re.sub(r"\((R|TM)\)| Processor", "", machine["cpu"].partition(",")[0]).strip()
    return f"{name} with AMX" if "amx_bf16" in machine.get("flags", ()) else name


def cells(row: Row) -> list[str]:
    content = read(row.file)
    found, machine = summary(row, content), content["machine"]
    numbers = [f"{found[key]:,.{row.digits}f}" for key in ("median", "min", "max")]
    spread = f"{numbers[1]} to {numbers[2]}" if found["rounds"] > 1 else "one round"
    what = row.what + (f", relative to {row.over}" if row.over else "")
    return [
        what,
        numbers[0],
        spread,
        str(found["rounds"]),
        cpu(machine),
        threads(machine),
        f"`{row.file}`",
    ]


def benchmarks() -> str:
    """The tables, and what their files do not record."""
    parts = []
    for heading, rows in TABLES.items():
        lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
        parts += [f"### {heading}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    files = sorted({row.file for rows in TABLES.values() for row in rows})
    silent = ", ".join(f"`{file}`" for file in files if "flags" not in read(file)["machine"])
    notes = [
        "The files are in `training/benchmark/measured/`. A median of one or two rounds shows no "
        "spread to rely on."
    ]
    notes += [f"These files do not record the CPU's instruction sets: {silent}."] if silent else []
    return "\n\n".join([*parts, " ".join(notes)])


def very_deep() -> str:
    """What the runs of ten thousand layers took."""
    lines = []
    for file in ("very_deep_preact_jax", "very_deep_vanilla_tensorflow"):
        run = read(file)
        settings = run["settings"]
        remat = f"`--remat {settings['remat']}`, " if settings["remat"] else ""
        lines.append(
            f"- `{run['name']}`, {run['parameters']:,} trainable parameters "
            f"({NAMES[run['backend']]}, {remat}batch {settings['batch']}, {run['cpu']}; threads "
            f"not recorded): {run['step_seconds']:.1f} s per step, "
            f"{run['peak_resident_bytes'] / 1e9:.1f} GB of memory, loss {run['losses'][0]:.2f} to "
            f"{run['losses'][-1]:.2f} in {len(run['losses'])} steps on one batch. File: `{file}`."
        )
    return "\n".join(lines)


def engines(precision: str) -> str:
    """How many times the images/s of the TensorFlow engine the OpenVINO engine reaches,
    least to most.
    """
    found = read("serving")["summary"]

    def speed(engine: str, batch: int) -> float:
        return found[f"{_DIRECT}/{engine}:precision={precision},batch={batch}"][
            "images_per_second"
        ]["median"]

    ratios = sorted(speed("openvino", batch) / speed("tensorflow", batch) for batch in (1, 32))
    words = [f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}" for ratio in ratios]
    return " to ".join(dict.fromkeys(words))
