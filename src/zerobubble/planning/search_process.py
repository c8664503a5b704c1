"""The process that searches for a plan in the background; `background` starts it by the path of this file.

It is started isolated (`python -I`), so that no file that happens to lie in the working directory or in `PYTHONPATH` stands in for a module
of the same name: its own packages come first, and only then the folders from which its parent imports. `zerobubble` is the package that
this file belongs to, as in the parent. It ends with its parent, and after its longest time whatever it does.
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
"""Seconds between two looks for whether the parent still lives."""


def main(parent: int, seconds: float, longest_s: float, niceness: int, folders: list[str]) -> None:
    """Read a pickled `Problem` from stdin, search `seconds` for the best schedule, and write the plan as the last line of stdout."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    faulthandler.dump_traceback_later(longest_s, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches this process too, and the parent decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(niceness)
    sys.path += [folder for folder in folders if folder not in sys.path]
    _import_own_package()
    from zerobubble.planning.competition import solve

    solved = solve(pickle.load(sys.stdin.buffer), seconds=seconds)
    answer.write(f"\n{json.dumps(solved.to_dict())}\n")
    answer.close()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, by whatever signal.

    On Windows, where a process keeps the number of a parent that has ended, its longest time ends it.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _import_own_package() -> None:
    """Import `zerobubble` from where this file lies, whatever else goes by that name."""
    home = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("zerobubble", home / "__init__.py", submodule_search_locations=[str(home)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["zerobubble"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
