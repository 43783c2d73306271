"""README tells the truth: its Python runs, its links exist, its numbers are those of the
files. test_docs.py parses its commands.
"""

import contextlib
import io
import json
import re
import statistics
import tomllib
from collections.abc import Callable
from pathlib import Path

import keras
import pytest

from training.reproduce import results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
#: A first page: the rest is in docs/.
WORDS = 900


def measured(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def digits_errors(*arrangements: str) -> list[float]:
    groups = results.groups(results.read(ROOT / "results"))
    return [
        statistics.median([record.error for record in groups[f"digits/resnet110-{arrangement}"]])
        for arrangement in arrangements
    ]


def fast() -> list[float]:
    run = measured("results/cifar10_fast/seed-0.json")
    return [100 * run["views"]["flip_shift"]["accuracy"], run["seconds"] / 60]


def very_deep() -> list[float]:
    [run] = results.groups(results.read(ROOT / "results"))["digits/resnet10001-full_preactivation"]
    return [run.final["test_error"], run.cost["seconds"] / 60]


def first_steps() -> list[float]:
    summary = measured("training/benchmark/measured/compile_stacked.json")["summary"]
    label = "cifar_resnet1001_preact:stacked=true"
    return [
        summary[f"{backend}/{label}"]["first_step_seconds"]["median"]
        for backend in ("tensorflow", "jax")
    ]


def gradient_ratios() -> list[float]:
    return [
        measured(f"results/depth/{name}-1001.json")["gradient_ratio"]
        for name in ("preact", "preact_scaled")
    ]


def served() -> list[float]:
    summary = measured("training/benchmark/measured/serving.json")["summary"]
    return [
        summary["server/imagenet_resnet50_preact/openvino:batching=on,concurrency=16"][
            "requests_per_second"
        ]["median"]
    ]


def trained() -> list[float]:
    card = "keras_preact/models/trained/cifar_fast_resnet8.cifar10.json"
    return [100 * measured(card)["accuracy"]]


#: What README says, its numbers in groups, to what the files hold. A sentence that changes changes
#: here too.
CLAIMS: dict[str, Callable[[], list[float]]] = {
    r"digits: original ([\d.]+) %, full pre-activation ([\d.]+) %": (
        lambda: digits_errors("original", "full_preactivation")
    ),
    r"([\d.]+) % of the test images; (\d+) minutes on two cores": fast,
    r"full pre-activation ([\d.]+) %, original ([\d.]+) %": (
        lambda: digits_errors("full_preactivation", "original")
    ),
    r"test error ([\d.]+) %; (\d+) minutes on one core": very_deep,
    r"first train step of ResNet-1001 \| ([\d.]+) s on TensorFlow, ([\d.]+) s on JAX": first_steps,
    r"1,001 layers \| ([\d,]+); with `DepthScaledHe` ([\d.]+)": gradient_ratios,
    r"ResNet-50 to 16 clients.* \| (\d+) requests per second": served,
    r"classifier for CIFAR-10, right on ([\d.]+) % of the test images": trained,
}


def rounded(value: float, written: str) -> str:
    """Return a value with as many significant digits as a number is written with."""
    digits = written.replace(",", "")
    places = (
        len(digits.partition(".")[2]) if "." in digits else len(digits.rstrip("0")) - len(digits)
    )
    return f"{round(value, places):,.{max(places, 0)}f}"


@pytest.mark.parametrize("claim", CLAIMS)
def test_numbers_are_those_of_the_files(claim):
    found = re.search(claim, " ".join(README.split()))
    assert found, f"README does not say this any more: {claim}"
    values = CLAIMS[claim]()
    assert list(found.groups()) == [
        rounded(value, text) for value, text in zip(values, found.groups(), strict=True)
    ]


def test_every_measured_claim_names_its_file_and_command():
    rows = re.findall(r"^\| (\[.*) \|$", README, re.M)
    assert len(rows) == 6
    for row in rows:
        first, _, command = row.split(" | ")
        assert re.search(r"\]\((?:results/|training/benchmark/measured/)", first), row
        assert re.fullmatch(r"`keras-preact (?:reproduce|benchmark) \w+`", command), row


@pytest.mark.soak
def test_python_runs_and_is_as_good_as_it_says():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    assert re.search(r"# (\w+): (0\.\d+)", "".join(blocks))
    for block in blocks:
        keras.utils.set_random_seed(0)
        names: dict = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, "README.md", "exec"), names)
        for metric, value in re.findall(r"# (\w+): (0\.\d+)", block):
            # seeds and backends differ by some images of 360; pixels in the wrong range cost far
            # more
            assert names["history"].history[metric][-1] > float(value) - 0.06


def test_linked_files_exist():
    links = re.findall(r'(?:\]\(|(?:src|srcset)=")(?!http)([^)#"]+)', README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


def test_it_is_a_first_page():
    assert len(README.split()) <= WORDS
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert set(re.findall(r"keras-preact (\d+\.\d+\.\d+)", README)) == {version}
