"""The process that searches for a plan in the background; `background` starts this file by path.

It runs isolated (`python -I`), so that no file in the working directory or in `PYTHONPATH` shadows a module: the interpreter's own packages
come first, then the folders from which its parent imports. `zerobubble` is the package that contains this file, as in the parent. The
process ends with its parent, and after its time limit in any case.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

_LOOK_S = 0.5
"""Seconds between two checks that the parent is alive."""


def main(parent: int, seconds: float, longest_s: float, niceness: int, folders: list[str]) -> None:
    """Reads a pickled `Problem` from stdin, searches for `seconds`, and writes the plan as the last line of stdout."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else that is printed mixes with the answer
    faulthandler.dump_traceback_later(longest_s, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches this process, too; the parent handles it
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(niceness)
    sys.path += [folder for folder in folders if folder not in sys.path]
    _import_own_package()
    from zerobubble.planning.competition import solve

    plan = solve(pickle.load(sys.stdin.buffer), seconds=seconds)
    answer.write(f"\n{json.dumps(plan.to_dict())}\n")
    answer.close()


def _end_with(parent: int) -> None:
    """Exits when the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _import_own_package() -> None:
    """Imports `zerobubble` from the folder of this file, even if another package has that name."""
    home = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("zerobubble", home / "__init__.py", submodule_search_locations=[str(home)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["zerobubble"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
