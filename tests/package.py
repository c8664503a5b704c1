"""Checks the distributions as users get them, in empty environments: `make package`, also in CI.

- The source distribution builds the same wheel as the repository, file by file.
- `twine check` accepts the metadata of both.
- The wheel runs in an empty environment of each Python that is here (3.11 to 3.14), without torch: both commands, a schedule, a page with
  its JavaScript, the explorer's playground, and every module is compiled with warnings as errors.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = "3.11", "3.12", "3.13", "3.14"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
RUN = """
import pathlib, sys
import zerobubble as zb
assert pathlib.Path(zb.__file__).is_relative_to(sys.prefix), zb.__file__
assert "torch" not in sys.modules
assert zb.simulate(zb.make("zb-v", 4, 8), zb.Costs.uniform(8)).makespan > 0
for file in pathlib.Path(zb.__file__).parent.rglob("*.py"):
    compile(file.read_text(encoding="utf-8"), str(file), "exec")
"""
COMMANDS = (
    ("zerobubble", "--version"),
    ("zb", "--version"),
    ("zb", "show", "zb-v", "-p", "4", "-m", "8"),
    ("zerobubble", "make", "zb-v", "-p", "4", "-m", "8", "-o", "page.html"),
)


def main() -> None:
    """Build, compare, check and run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = built("sdist", clone(folder), folder / "sdist"), built("wheel", clone(folder), folder / "wheel")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
        again = built("wheel", source, folder / "again")
        require(contents(again) == contents(wheel), "the source distribution builds the wheel of the repository")
        run(sys.executable, "-m", "venv", folder / "twine")
        run(folder / "twine/bin/pip", "install", "-q", "--disable-pip-version-check", "twine")
        run(folder / "twine/bin/twine", "check", "--strict", sdist, wheel)
        pythons = dict(interpreters())
        for version in PYTHONS:
            if version in pythons:
                run_in_empty_environment(pythons[version], wheel, folder / version)
            print(f"Python {version}: {'passed' if version in pythons else 'no interpreter here, not checked'}", flush=True)
        require(bool(pythons), "the wheel was run")


def clone(folder: Path) -> Path:
    """A copy of the files of the repository, without what is generated."""
    tree = folder / "clone"
    if not tree.exists():
        ignored = [line.rstrip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*ignored, ".git"))
    return tree


def built(kind: str, tree: Path, out: Path) -> Path:
    """The distribution of a kind, made by the build backend."""
    run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=tree)
    (file,) = out.iterdir()
    return file


def contents(wheel: Path) -> dict[str, bytes]:
    """The bytes of each file of a wheel; its RECORD follows from them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def interpreters() -> Iterator[tuple[str, str]]:
    """The Pythons on the path and of pyenv, by version."""
    for version in PYTHONS:
        of_pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
        here = [sys.executable] if version == f"{sys.version_info[0]}.{sys.version_info[1]}" else []
        candidates = [*here, *map(str, of_pyenv), shutil.which(f"python{version}")]
        working = (found for found in candidates if found and makes_environments(found))
        if python := next(working, None):
            yield version, python


def makes_environments(python: str) -> bool:
    """Whether a Python runs and has what an environment needs; a shim of pyenv may do neither."""
    return subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0


def run_in_empty_environment(python: str, wheel: Path, folder: Path) -> None:
    """Installs the wheel with what it requires, and runs it outside of the repository."""
    run(python, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "-q", "--disable-pip-version-check", wheel)
    run(folder / "bin/python", "-W", "error", "-c", RUN, cwd=folder)
    for command, *args in COMMANDS:
        run(folder / "bin" / command, *args, cwd=folder)
    page = (folder / "page.html").read_text(encoding="utf-8")
    require("<script" in page and "<style" in page, "the page has the files of the wheel")
    run(folder / "bin/python", "-m", "zerobubble.explorer.playground", "playground.html", cwd=folder)


def run(*command: object, cwd: Path | None = None) -> None:
    """Runs a command; prints what it printed if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def require(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"not true: {what}")


if __name__ == "__main__":
    main()
