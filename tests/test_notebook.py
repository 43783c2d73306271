"""The guide ran from top to bottom, and its claims hold in a fresh kernel.

`python tests/test_notebook.py` runs it and writes the outputs into it.
"""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

import keras_preact as kp

PATH = Path(__file__).parents[1] / "docs" / "identity_mappings.ipynb"
NOTEBOOK = nbformat.read(PATH, as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
TEXT = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")


def run() -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a fresh kernel; its own assertions hold."""
    # The log of TensorFlow's C++ code at its import does not belong in the notebook. Python's
    # warnings are captured nevertheless.
    quiet = ["--IPKernelApp.capture_fd_output=False"]
    notebook = nbformat.read(PATH, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", record_timing=False, extra_arguments=quiet
    )
    return client.execute(cwd=str(PATH.parent))


@pytest.mark.soak
@pytest.mark.process
def test_it_runs():
    run()


def test_what_is_committed_ran_from_top_to_bottom():
    nbformat.validate(NOTEBOOK)
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell.outputs]
    assert not [each for each in outputs if each.output_type == "error"]
    assert not [each for each in outputs if each.get("name") == "stderr"]
    without_figures = re.sub(r'"image/png": "[^"]*"', "", PATH.read_text())
    assert not re.findall(r"/(?:home|root|tmp|Users|work|usr)/\S*", without_figures)


def test_sections_assert_what_they_claim():
    _, *sections = re.split(
        r"^## (?=\d)", "\n".join(cell.source for cell in NOTEBOOK.cells), flags=re.M
    )
    assert len(sections) >= 5
    for section in sections:
        assert re.search(r"^ *assert ", section, re.M), section.partition("\n")[0]


def test_errors_and_links_in_the_text():
    published = {f"{row.error:.2f}" for row in kp.published.RESULTS if row.error is not None}
    assert set(re.findall(r"(\d+\.\d+) %", TEXT)) <= published
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        is_paper = re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", link)
        assert is_paper or (PATH.parent / link).exists(), link


if __name__ == "__main__":
    nbformat.write(run(), PATH)
