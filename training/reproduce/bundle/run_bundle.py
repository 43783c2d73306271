"""Run training.reproduce with what lies beside this file: `python FOLDER/run_bundle.py
ARGUMENTS...`.

Takes Python, JAX, NumPy and Pillow; the first start unpacks the code and the wheels
into FOLDER. Results and unfinished runs are kept in FOLDER/results and FOLDER/runs: it
is the working folder, which relative paths in ARGUMENTS begin at.
"""

# Standard library only, and nothing that an old Python cannot parse: it is to say that it is too
# old.
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MANIFEST = FOLDER / "bundle-manifest.json"
#: What the machine has to have: module to the name of its package.
NEEDED = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "ml_dtypes": "ml_dtypes",
    "numpy": "numpy",
    "PIL": "pillow",
}


def fail(message):
    """End with one line on stderr and status 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def read_manifest():
    """Return the manifest and its hash."""
    try:
        contents = MANIFEST.read_bytes()
    except OSError:
        fail(f"{MANIFEST.name} is missing: copy it from the bundle into {FOLDER}.")
    try:
        manifest = json.loads(contents.decode())
        return {key: manifest[key] for key in ("python", "module", "pieces")}, hashlib.sha256(
            contents
        ).hexdigest()
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{MANIFEST} is damaged: {error!r}. Copy it again.")


def check_python(version):
    """Check that this is the Python that the wheels are for, and that it has what the
    bundle does not bring.
    """
    own = "{}.{}".format(*sys.version_info[:2])
    if own != version:
        fail(
            f"This bundle is for Python {version}, and this is Python {own}: start it with "
            f"python{version}, or make a bundle with --python {own}."
        )
    missing = sorted(
        NEEDED[module] for module in NEEDED if importlib.util.find_spec(module) is None
    )
    if missing:
        fail(
            "{} lacks {}, which a bundle does not bring: install it there.".format(
                sys.executable, ", ".join(missing)
            )
        )


def check_pieces(pieces):
    """Check that all pieces are there, and whole."""
    missing = [name for name in pieces if not (FOLDER / name).is_file()]
    if missing:
        fail(
            "{} lacks {} of {} pieces: copy {} there.".format(
                FOLDER, len(missing), len(pieces), ", ".join(missing)
            )
        )
    damaged = [name for name in pieces if sha256(FOLDER / name) != pieces[name]["sha256"]]
    if damaged:
        fail(
            "Damaged, or of another bundle: {} in {}. Copy again.".format(
                ", ".join(damaged), FOLDER
            )
        )


def sha256(path):
    """Return the hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(2**20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(pieces, tree):
    """Unpack code and wheels into `tree`, as a whole; lay the results into the working
    folder where it lacks them.
    """
    temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=str(FOLDER)))
    try:
        for name in pieces:
            if name.startswith("code-and-wheels-"):
                with zipfile.ZipFile(str(FOLDER / name)) as archive:
                    archive.extractall(str(temporary))
        for wheel in sorted(temporary.glob("wheels/*.whl")):
            with zipfile.ZipFile(str(wheel)) as archive:
                archive.extractall(str(temporary / "site-packages"))
        shutil.rmtree(str(temporary / "wheels"), ignore_errors=True)
        for result in sorted(temporary.glob("results/**/*.json")):
            own = FOLDER / result.relative_to(temporary)
            if not own.exists():
                own.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(result), str(own))
        temporary.chmod(0o755)
        if not tree.exists():  # another start may have been faster
            temporary.rename(tree)
    finally:
        shutil.rmtree(str(temporary), ignore_errors=True)


def main():
    """Check, unpack, and become the process that trains."""
    manifest, digest = read_manifest()
    check_python(manifest["python"])
    check_pieces(manifest["pieces"])
    tree = FOLDER / f"unpacked-{digest[:12]}"
    try:
        if not tree.exists():
            unpack(manifest["pieces"], tree)
        os.chdir(str(FOLDER))
    except OSError as error:
        fail(
            f"Cannot unpack the bundle in {FOLDER}: {error}. Copy it into a folder that can be "
            "written."
        )
    paths = [str(tree), str(tree / "site-packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(
        os.environ,
        KERAS_BACKEND="jax",
        KERAS_PREACT_DATA=str(FOLDER),
        PYTHONPATH=os.pathsep.join(paths),
    )
    environment["PYTHONSAFEPATH"] = (
        "1"  # a checkout in the working folder is not to be taken for the bundle's code
    )
    # several processes may train on one accelerator
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.stdout.flush()
    os.execve(
        sys.executable, [sys.executable, "-m", manifest["module"], *sys.argv[1:]], environment
    )


if __name__ == "__main__":
    main()
