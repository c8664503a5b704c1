"""Columns of numbers as short texts: little-endian arrays, deflated, in base64. `web/columns.js` reads them."""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Sequence

LEVEL = 6


def packed(values: Sequence[int]) -> dict[str, str]:
    """The column as `{"type": ..., "data": ...}`: four bytes a number (`i4`) where all fit, else the eight of a double (`f8`).

    A double holds whole numbers up to 2**53 exactly, which is 104 days in ns.
    """
    column: array[int] | array[float]
    try:
        column, name = array("i", values), "i4"
    except OverflowError:
        column, name = array("d", values), "f8"
    if sys.byteorder == "big":
        column.byteswap()
    return {"type": name, "data": b64encode(zlib.compress(column.tobytes(), LEVEL)).decode("ascii")}
