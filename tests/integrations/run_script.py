"""Runs one of `scripts` as one process, or on the ranks of a pipeline: `run_script.py NAME FOLDER`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from tests.integrations.scripts import NAMES

SCRIPTS = {name: importlib.import_module(f"tests.integrations.scripts.{name}").main for name in NAMES}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SCRIPTS[sys.argv[1]](Path(sys.argv[2]), "RANK" in os.environ)
