"""Schedules of the user's own: registered by the decorator, or installed by another package, and usable everywhere at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import zerobubble as zb
from tests.refusals import Stated, raises, states
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.schedules import SCHEDULES, Recipe, registry

BUILDERS = '''
from zerobubble import make
from zerobubble.schedules import Recipe

def drain(ranks, microbatches, stages_per_rank=1, depth: int = 0):
    """Fills and drains.

    Good for: nothing.
    """
    return make("gpipe", ranks, microbatches)

looped = Recipe("unread", lambda p, m, v: make("interleaved-1f1b", p, m, v), stages_per_rank=3, any_stages=True)
'''

Install = Callable[..., None]


def even(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """An even number of ranks."""
    return f"needs an even number of ranks, got {ranks}" if ranks % 2 else ""


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers and imports is gone after it."""
    monkeypatch.setattr(registry, "registered", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with one module and these entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, code: str = BUILDERS, **schedules: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {target}" for name, target in schedules.items()]
        (info / "entry_points.txt").write_text("\n".join(["[zerobubble.schedules]", *lines, ""]))
        (tmp_path / f"{package}.py").write_text(code)

    return install


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def register(name: str = "mine") -> Callable[..., zb.Schedule]:
    @zb.schedules.register(name, stages_per_rank=2, any_stages=True, needs=even)
    def backwards_last(ranks: int, microbatches: int, stages_per_rank: int = 2, *, twice: bool = False) -> zb.Schedule:
        """Mine."""
        return zb.make("breadth-first", ranks, microbatches, stages_per_rank + twice)

    return backwards_last


def test_a_registered_function_is_a_schedule_at_once() -> None:
    build = register()
    assert build(2, 3, 1) == zb.make("mine", 2, 3, 1)
    assert zb.make("mine", 2, 3).num_stages == 4
    assert zb.make("mine", 2, 3, 2, twice=True).num_stages == 6
    assert zb.schedules.known_schedules()["mine"] == Recipe("mine", build, 2, True, even)
    assert list(zb.schedules.known_schedules()) == [*SCHEDULES, "mine"]
    with raises(InputError, 3, "mine", "ranks"):
        zb.make("mine", 3, 3)
    with raises(InputError, "mien", "mine"):
        zb.make("mien", 2, 3)
    row = json.loads(run("list", "--json").stdout)[-1]
    assert (row["name"], row["summary"], row["needs"], row["options"]) == ("mine", "Mine.", "An even number of ranks.", {"twice": False})
    shown = json.loads(run("show", "mine", "--ranks", "2", "--microbatches", "3", "--set", "twice=true", "--json").stdout)
    assert shown["num_stages"] == 6


def test_published_stay_the_published() -> None:
    register()
    assert "mine" not in SCHEDULES


def test_a_taken_name_says_by_whom() -> None:
    register()
    register()  # the same function again, as when the cell of a notebook runs twice
    with raises(InputError, "mine", "tests.pure.test_own_schedules.register", "backwards_last"):
        zb.schedules.register("mine")(lambda ranks, microbatches, stages_per_rank: zb.make("1f1b", ranks, microbatches))
    with raises(InputError, "zb-v", "zerobubble.schedules.zb_v.zb_v"):
        register("zb-v")
    assert list(registry.registered) == ["mine"]


def test_an_installed_schedule_is_loaded_when_it_is_asked_for(install: Install) -> None:
    install("acme_one", drain="acme_one:drain", far_looped="acme_one:looped")
    assert zb.make("1f1b", 2, 3).name == "1f1b"
    assert "acme_one" not in sys.modules
    assert zb.make("drain", 2, 3, depth=1).rows == zb.make("gpipe", 2, 3).rows
    assert "acme_one" in sys.modules
    assert zb.make("far-looped", 2, 4).num_stages == 6
    known = zb.schedules.known_schedules()
    assert [known[name].name for name in ("drain", "far-looped")] == ["drain", "far-looped"]
    assert (known["drain"].summary, known["drain"].good_for, known["drain"].options) == ("Fills and drains.", "nothing.", {"depth": 0})
    with raises(InputError, "drian", "drain"):
        zb.make("drian", 2, 3)


def test_the_command_line_knows_installed_schedules(install: Install, tmp_path: Path) -> None:
    install("acme_one", drain="acme_one:drain")
    states(run("list").stdout, "drains", "Fills")
    file = tmp_path / "drain.txt"
    assert run("make", "drain", "--ranks", "2", "--microbatches", "3", "--set", "depth=2", "-o", str(file)).exit_code == 0
    assert "is legal" in run("check", str(file)).stdout
    assert json.loads(run("show", "drain", "--ranks", "2", "--microbatches", "3", "--json").stdout)["makespan_ms"] == 12
    refused = run("show", "drain", "--ranks", "2", "--microbatches", "3", "--set", "depth=deep")
    assert (refused.exit_code, refused.stderr) == (2, "zerobubble: the option depth of drain must be a whole number, got 'deep'\n")


def test_a_package_may_register_the_schedule_that_it_offers(install: Install) -> None:
    code = BUILDERS + "\nimport zerobubble\nzerobubble.schedules.register('drain', stages_per_rank=2)(drain)\n"
    install("acme_one", code, drain="acme_one:drain")
    assert zb.schedules.known_schedules()["drain"].stages_per_rank == 2
    assert zb.schedules.known_schedules()["drain"].stages_per_rank == 2  # and once more, now that it is registered before it is offered


@pytest.mark.parametrize(
    ("code", "target", "cause"),
    [
        ("import no_such_module", "acme_bad:drain", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "acme_bad:drain", "AttributeError: module 'acme_bad' has no attribute 'drain'"),
        ("drain = 3", "acme_bad:drain", "InputError: "),
    ],
)
def test_what_cannot_be_imported_is_reported_when_asked_for(install: Install, code: str, target: str, cause: str) -> None:
    install("acme_bad", code, drain=target)
    assert zb.make("1f1b", 2, 3).name == "1f1b"
    with raises(InputError, "drain", "acme_bad", foreign=cause) as caught:
        zb.make("drain", 2, 3)
    assert list(zb.schedules.known_schedules()) == list(SCHEDULES)
    listed = run("list", "--json")
    assert listed.exit_code == 0
    assert str(caught.value) in listed.stderr
    assert len(json.loads(listed.stdout)) == len(SCHEDULES)


@pytest.mark.parametrize(
    ("offers", "stated"),
    [
        ({"acme_one": "zb-v"}, ("zb-v", "acme_one")),
        ({"acme_one": "drain", "acme_two": "drain"}, ("drain",)),
        ({"acme_one": "mine"}, ("mine", "acme_one")),
    ],
)
def test_a_clash_names_both_packages(install: Install, offers: dict[str, str], stated: Stated) -> None:
    register()
    for package, name in offers.items():
        install(package, **{name.replace("-", "_"): f"{package}:drain"})
    assert zb.make("zb-v", 2, 3).name == "zb-v"
    with raises(InputError, *stated, *offers):
        zb.schedules.known_schedules()
    refused = run("list")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_pipeline_takes_a_schedule_of_ones_own() -> None:
    program_cache = pytest.importorskip("zerobubble.runtime.executor.program_cache")
    register()
    assert program_cache.schedule_for("mine", 2, 4) == zb.make("mine", 2, 4)
