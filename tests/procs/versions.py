"""Marks for tests of what older versions of torch cannot do."""

from __future__ import annotations

import pytest

from zerobubble.runtime.split.eligibility import CAN_SEE_HOOKS

needs_checkpoints_in_graphs = pytest.mark.skipif(not CAN_SEE_HOOKS, reason="a graph stage takes checkpoints from torch 2.8 on")
