"""Write the tables of docs/frameworks.md: what of each training framework works with zerobubble, and what is refused.

Both come from the tests, which say what they show by the markers `feature` and `refuses`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TESTS = PAGE.parents[1] / "tests"
FRAMEWORKS = {
    "integrations/test_transformers": "Trainer",
    "integrations/test_own_losses": "Trainer",
    "integrations/test_trl": "TRL",
    "integrations/test_lightning": "Lightning",
    "integrations/test_fabric": "Fabric",
    "integrations/test_torchtitan": "torchtitan",
    "integrations/test_automodel": "AutoModel",
    "integrations/test_deepspeed": "DeepSpeed",
    "integrations/test_megatron": "Megatron-Core",
    "procs/test_torch_runtime": "PyTorch's pipelining",
}
"""The frameworks by the files of their tests, in the order of the columns."""
START, END = "<!-- written by docs/frameworks.py -->\n", "<!-- end -->\n"


def shown(file: Path, marker: str) -> Iterator[str]:
    """The names that the tests of a file give to `pytest.mark.feature` or `pytest.mark.refuses`, in the order of the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{marker}":
            yield from (ast.literal_eval(argument) for argument in node.args)


def table() -> str:
    """A row for each feature and a column for each framework."""
    files: dict[str, list[Path]] = {}
    for stem, name in FRAMEWORKS.items():
        files.setdefault(name, []).append(TESTS / f"{stem}.py")
    works = {name: {feature for file in of_one for feature in shown(file, "feature")} for name, of_one in files.items()}
    refused = {name: {feature for file in of_one for feature in shown(file, "refuses")} for name, of_one in files.items()}
    features = sorted({feature for names in (*works.values(), *refused.values()) for feature in names}, key=str.lower)
    features.sort(key=lambda feature: -sum(feature in works[name] for name in files))
    lines = ["| | " + " | ".join(files) + " |", "|---|" + "---|" * len(files)]
    for feature in features:
        cells = ("works" if feature in works[name] else "refused" if feature in refused[name] else "" for name in files)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The text of docs/frameworks.md with a fresh table."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    return before + START + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
