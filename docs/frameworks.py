"""Write the tables of docs/frameworks.md: what of each training framework works with zerobubble, and what is refused.

Both come from the tests, which say what they show by the markers `feature` and `refuses`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TESTS = PAGE.parents[1] / "tests"
FRAMEWORKS = {
    "integrations/test_transformers": "Trainer",
    "integrations/test_own_losses": "Trainer",
    "integrations/test_own_data": "Trainer",
    "integrations/test_trl": "TRL",
    "integrations/test_lightning": "Lightning",
    "integrations/test_own_numbers": "Lightning",
    "integrations/test_shared_arguments": "Lightning",
    "integrations/test_fabric": "Fabric",
    "integrations/test_torchtitan": "torchtitan",
    "integrations/test_automodel": "AutoModel",
    "integrations/test_deepspeed": "DeepSpeed",
    "integrations/test_megatron": "Megatron-Core",
    "procs/test_torch_runtime": "PyTorch's pipelining",
}
"""The frameworks by the files of their tests, in the order of the columns."""
COMMON = 3
"""Frameworks in which a feature of the table works."""
START, END = "<!-- written by docs/frameworks.py -->\n", "<!-- end -->\n"


def shown(file: Path, marker: str) -> Iterator[str]:
    """The names that the tests of a file give to `pytest.mark.feature` or `pytest.mark.refuses`, in the order of the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{marker}":
            yield from (ast.literal_eval(argument) for argument in node.args)


def shown_in(name: str, marker: str) -> set[str]:
    """The names that the tests of a framework give to a marker."""
    return {feature for stem, framework in FRAMEWORKS.items() if framework == name for feature in shown(TESTS / f"{stem}.py", marker)}


def table() -> str:
    """The features of at least `COMMON` frameworks as a table, and below it all features of each framework, folded."""
    names = list(dict.fromkeys(FRAMEWORKS.values()))
    works, refused = ({name: shown_in(name, marker) for name in names} for marker in ("feature", "refuses"))
    counts = Counter(feature for name in names for feature in works[name])
    common = sorted((feature for feature, count in counts.items() if count >= COMMON), key=lambda one: (-counts[one], one.lower()))
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for feature in common:
        cells = ("works" if feature in works[name] else "refused" if feature in refused[name] else "" for name in names)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + "\n".join(_folded(name, works[name], refused[name]) for name in names)


def _folded(name: str, works: set[str], refused: set[str]) -> str:
    """All that is tested with a framework, which opens by its name."""
    parts = [f"<details>\n<summary>{name}: {len(works)} tested to work, {len(refused)} refused</summary>\n"]
    for title, features in (("Works", works), ("Refused", refused)):
        if features:
            parts.append(f"{title}:\n\n" + "".join(f"- {feature}\n" for feature in sorted(features, key=str.lower)))
    return "\n".join([*parts, "</details>\n"])


def page() -> str:
    """The text of docs/frameworks.md with a fresh table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    return before + START + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
