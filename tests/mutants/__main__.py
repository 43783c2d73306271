"""Break the code in one place at a time, and see whether a test fails.

    python tests/mutants                  # all mutants, one after another
    python tests/mutants wrong_fan --jobs 2 'bn_*'
    python tests/mutants serving          # those of an area, a file of this folder
    python tests/mutants --list

Each mutant replaces one piece of text in one file of a copy of the tree, and runs the
tests that must notice. First, the same tests run on the unbroken copy: they must pass.
The exit status is 0 if every mutant is killed, 1 if one survives, 2 for an error, such
as a replacement that no longer applies.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken place.

    Args:
        area: The file of this folder that lists it, without its suffix.
        name: What is broken.
        file: Where, from the root of the repository.
        old: Text that the file has exactly once.
        new: What takes its place.
        tests: Files or node ids of fast tests, of which one must fail.
        only: An expression for pytest's `-k`, to run fewer of them.
        backend: Keras' backend for the tests, if it matters.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""
    backend: str = ""

    def is_named(self, pattern: str) -> bool:
        """Whether a pattern is its name's, or its area."""
        return pattern == self.area or fnmatch.fnmatch(self.name, pattern)

    def text(self, folder: Path) -> str:
        """Return the text of the file below `folder`.

        Raises:
            LookupError: if the text to replace is not in it exactly once.
        """
        path = folder / self.file
        text = path.read_text() if path.is_file() else ""
        if text.count(self.old) != 1:
            raise LookupError(
                f"{self.name}: {self.file} has the text {text.count(self.old)} times, not once: "
                f"{self.old!r}"
            )
        return text

    def apply(self, folder: Path) -> str:
        """Break the file below `folder` and return its text from before."""
        text = self.text(folder)
        (folder / self.file).write_text(text.replace(self.old, self.new))
        return text


def read(folder: Path) -> list[Mutant]:
    """Return the mutants of the TOML files in a folder."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text())["mutants"]:
            tests = tuple(f"tests/{test}" for test in row["tests"])
            mutants.append(Mutant(path.stem, **row | {"tests": tests}))
    return mutants


MUTANTS = read(Path(__file__).parent)


def copy_of_the_tree(target: Path) -> Path:
    """Copy what git tracks, or would track if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(
    folder: Path, tests: list[str], only: str = "", backend: str = ""
) -> subprocess.CompletedProcess:
    """Run fast tests of the tree in `folder`, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **({"KERAS_BACKEND": backend} if backend else {}),
    }
    return subprocess.run(
        [*command, "-m", "not soak", *(["-k", only] if only else []), *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # names of files in a report may be no text
    )


def survives(mutant: Mutant, folder: Path) -> bool:
    """Break the tree in `folder`, run the mutant's tests and mend it again.

    Raises:
        LookupError: if the text is not there exactly once.
        RuntimeError: if the tests do not run.
    """
    text = mutant.apply(folder)
    try:
        done = run_tests(folder, list(mutant.tests), mutant.only, mutant.backend)
    finally:
        (folder / mutant.file).write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def failures_without_mutants(mutants: list[Mutant], folder: Path) -> str:
    """Return what pytest says if the tests fail on the unbroken tree, else nothing."""
    parts: dict[tuple, list[Mutant]] = {}
    for mutant in mutants:
        parts.setdefault((mutant.backend, bool(mutant.only)), []).append(mutant)
    for (backend, _), alike in parts.items():
        tests = sorted({test for mutant in alike for test in mutant.tests})
        only = " or ".join(sorted({f"({mutant.only})" for mutant in alike if mutant.only}))
        done = run_tests(folder, tests, only, backend)
        if done.returncode:
            return done.stdout
    return ""


def check(mutants: list[Mutant], jobs: int) -> int:
    """Run the mutants in `jobs` copies of the tree; return the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folders.put(copy_of_the_tree(Path(temporary) / f"tree{number}"))

        def result(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return "SURVIVED" if survives(mutant, folder) else "killed"
            except (LookupError, RuntimeError) as error:
                return f"ERROR {error}"
            finally:
                folders.put(folder)

        if said := failures_without_mutants(mutants, Path(temporary) / "tree0"):
            print(f"The tests fail on the unbroken code:\n{said}")
            return 2
        results = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for mutant, found in zip(mutants, pool.map(result, mutants), strict=True):
                print(f"{mutant.name:36} {found}", flush=True)
                results.append(found)
    killed, survived = results.count("killed"), results.count("SURVIVED")
    errors = len(results) - killed - survived
    print(f"{killed} of {len(mutants)} killed, {survived} survived, {errors} not run")
    return 2 if errors else int(survived > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names, patterns such as 'bn_*', or areas")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the mutants, check that each applies, and run none",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at the same time")
    options = parser.parse_intermixed_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not options.names or any(map(mutant.is_named, options.names))
    ]
    unknown = [
        each for each in options.names if not any(mutant.is_named(each) for mutant in MUTANTS)
    ]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}. --list names them all")
    if options.list:
        for mutant in chosen:
            mutant.text(ROOT)
            print(f"{mutant.name:36} {mutant.file}")
        return 0
    return check(chosen, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
