"""docs/frameworks.md: its table matches the tests and lists every page of a framework."""

from __future__ import annotations

import pytest

from docs import frameworks

OF_NO_FRAMEWORK = {
    "integrations/test_quantized",
    "integrations/test_scripts",
    "integrations/test_slices",
    "integrations/test_telemetry",
    "integrations/test_versions",
}


def test_the_table_is_that_of_the_tests() -> None:
    assert frameworks.PAGE.read_text(encoding="utf-8") == frameworks.page(), "run `python -m docs.frameworks`"


def test_every_file_of_tests_has_its_column_and_shows_something() -> None:
    files = {f"integrations/{file.stem}" for file in frameworks.TESTS.glob("integrations/test_*.py")}
    assert files - OF_NO_FRAMEWORK <= set(frameworks.FRAMEWORKS)
    for name in frameworks.FRAMEWORKS:
        assert list(frameworks.shown(frameworks.TESTS / f"{name}.py", "feature")), name


@pytest.mark.parametrize("stem", frameworks.FRAMEWORKS)
def test_nothing_works_and_is_refused(stem: str) -> None:
    file = frameworks.TESTS / f"{stem}.py"
    works, refused = (set(frameworks.shown(file, marker)) for marker in ("feature", "refuses"))
    assert not works & refused
