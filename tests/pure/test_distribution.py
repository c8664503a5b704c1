"""A source distribution has every file of the repository, tests and pages among them, and nothing generated. A wheel has the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import zerobubble as zb
from tests.nearest import ROOT

IGNORED = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
GENERATED = [line.rstrip("/").rpartition("/")[2] for line in IGNORED]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
METADATA = "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
OF_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without what is generated, as a clone has it."""
    tree = tmp_path_factory.mktemp("clone") / "zerobubble"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*GENERATED, ".git"))
    return tree


def built(kind: str, tree: Path, out: Path) -> Path:
    """The distribution of a kind, made by the build backend alone, without a network."""
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", str(out)], cwd=tree, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


def files_below(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_a_source_distribution_has_every_file_and_none_that_is_generated(tree: Path, tmp_path: Path) -> None:
    wanted = files_below(tree)
    for folder in ("tests/procs", "docs", "examples", "benchmarks", "src/zerobubble/view/web"):
        assert any(name.startswith(f"{folder}/") for name in wanted)
    for name in ("docs/_build/index.html", "docs/playground/index.html", "docs/reference/a.md", "tests/__pycache__/a.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    with tarfile.open(built("sdist", tree, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    names = {name for name in names - OF_SETUPTOOLS if ".egg-info/" not in name}
    assert (wanted - names, names - wanted) == (set(), set())


@pytest.mark.long
def test_a_wheel_has_the_package_alone(tree: Path, tmp_path: Path) -> None:
    package = {name.removeprefix("src/") for name in files_below(tree) if name.startswith("src/") and ".egg-info/" not in name}
    with zipfile.ZipFile(built("wheel", tree, tmp_path)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert (package - names, names - package) == (set(), set())


def metadata(tree: Path, out: Path) -> str:
    """The metadata of a wheel."""
    name = subprocess.run(
        [sys.executable, "-c", METADATA, str(out)], cwd=tree, check=True, capture_output=True, text=True
    ).stdout.splitlines()[-1]
    return (out / name / "METADATA").read_text(encoding="utf-8")


def test_the_metadata_has_the_version_and_the_readme(tree: Path, tmp_path: Path) -> None:
    """With the links of the repository, as long as it has no address."""
    found = metadata(tree, tmp_path)
    assert f"\nVersion: {zb.__version__}\n" in found
    assert found.endswith((ROOT / "README.md").read_text(encoding="utf-8"))


def test_one_address_makes_every_link_of_the_readme_absolute(tree: Path, tmp_path: Path) -> None:
    addressed, address = tmp_path / "addressed", "https://example.org/zerobubble"
    shutil.copytree(tree, addressed)
    with (addressed / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f'\n[project.urls]\nRepository = "{address}/"\n')
    found = metadata(addressed, tmp_path)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", found)
    expected = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 30
    assert links == [(image, f"{address}/{'raw' if image else 'blob'}/HEAD/{path}") for image, path in expected]


@pytest.mark.long
def test_an_extra_is_found_without_an_index_where_zerobubble_is_installed() -> None:
    """So `pip install 'zerobubble[plan]'`, which errors advise, also works where zerobubble was installed from a clone."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--disable-pip-version-check", "zerobubble[plan]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
