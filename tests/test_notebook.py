"""The guide runs in a fresh kernel on this backend, its claims hold, and what is
committed is what it says when it runs.

`python tests/test_notebook.py` runs it and writes what it shows into it.
"""

import ast
import re
from pathlib import Path

import keras
import nbclient
import nbformat
import pytest

import keras_preact as kp

PATH = Path(__file__).parents[1] / "docs" / "identity_mappings.ipynb"
NOTEBOOK = nbformat.read(PATH, as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
TEXT = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown"]


def sections() -> dict[str, list[str]]:
    """Return the headings of second order, each with the sources of its code cells."""
    found: dict[str, list[str]] = {}
    for cell in NOTEBOOK.cells:
        headings = (
            re.findall(r"^## (.+)$", cell.source, flags=re.M)
            if cell.cell_type == "markdown"
            else []
        )
        found |= {heading: [] for heading in headings}
        if cell.cell_type == "code" and found:
            found[list(found)[-1]].append(cell.source)
    return found


def said(cell) -> list[str]:
    """Return what a cell shows: its text without numbers, run together, and a word for
    each figure.
    """
    shown = [""]
    for output in cell.outputs:
        if output.output_type == "stream":
            shown[-1] += output.text
        elif "image/png" in output.data:
            shown += ["figure", ""]
        else:
            shown[-1] += output.data.get("text/markdown", output.data["text/plain"])
    return [" ".join(re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "0", each).split()) for each in shown]


def numbers(cell) -> list[float]:
    """Return every number that a cell shows as text, in order."""
    texts = [
        output.text
        if output.output_type == "stream"
        else output.data.get("text/markdown", output.data["text/plain"])
        for output in cell.outputs
        if output.output_type == "stream" or "image/png" not in output.data
    ]
    found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "\n".join(texts))
    return [float(number.replace(",", "")) for number in found]


def troubles(notebook) -> list[str]:
    """Return the errors and what was written to stderr, where warnings go."""
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    errors = [output.evalue for output in outputs if output.output_type == "error"]
    return errors + [
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]


def alike(was: float, now: float) -> bool:
    """Whether a number is what is committed, up to another machine's or backend's
    rounding, which training amplifies.

    Rounding errors, below 1e-4, stay small; others keep their sign and their size.
    """
    if max(abs(was), abs(now)) < 1e-4:
        return True
    return was * now > 0 and 1 / 3 < now / was < 3


def run() -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a fresh kernel."""
    # Python's warnings are caught; what TensorFlow's C++ logs when it is loaded is not the
    # notebook's.
    quiet = ["--IPKernelApp.capture_fd_output=False"]
    notebook = nbformat.read(PATH, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", record_timing=False, extra_arguments=quiet
    )
    return client.execute(cwd=str(PATH.parent))


@pytest.mark.soak
@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="compiles many small networks, for minutes"
)
def test_it_runs_and_says_what_is_committed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    fresh = run()
    assert not troubles(fresh)
    compared = 0
    for cell, committed in zip(
        (cell for cell in fresh.cells if cell.cell_type == "code"), CODE, strict=True
    ):
        assert said(cell) == said(committed), cell.id
        was, now = numbers(committed), numbers(cell)
        assert len(now) == len(was), cell.id
        assert [f for f in zip(was, now, strict=True) if not alike(*f)] == [], cell.id
        compared += len(was)
    assert compared > 100


def test_what_is_committed_ran_from_top_to_bottom():
    nbformat.validate(NOTEBOOK)
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not troubles(NOTEBOOK)
    assert sum("figure" in said(cell) for cell in CODE) >= 10


def test_what_is_committed_is_clean():
    assert set(NOTEBOOK.metadata) == {"kernelspec", "language_info"}
    assert NOTEBOOK.metadata.kernelspec.name == "python3"
    assert all(not cell.metadata for cell in NOTEBOOK.cells)
    assert PATH.stat().st_size < 1_500_000
    without_figures = re.sub(r'"image/png": "[^"]*"', "", PATH.read_text())
    assert not re.findall(r"/(?:home|root|tmp|Users|work|usr)/\S*", without_figures)


@pytest.mark.parametrize("section", [heading for heading in sections() if heading[0].isdigit()])
def test_sections_assert_what_they_claim(section):
    trees = [ast.parse(source.replace("%matplotlib inline", "")) for source in sections()[section]]
    assert any(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree))


def test_errors_in_the_text_are_published():
    published = {f"{row.error:.2f}" for row in kp.published.RESULTS if row.error is not None}
    assert set(re.findall(r"(\d+\.\d+) %", "\n".join(TEXT))) <= published


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(TEXT))
    assert links
    for link in links:
        is_paper = re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", link)
        assert is_paper or (PATH.parent / link).exists(), link


if __name__ == "__main__":
    nbformat.write(run(), PATH)
