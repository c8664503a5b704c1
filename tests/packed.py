"""Reads the columns of a page back, as its scripts do."""

import json
import struct
import zlib
from base64 import b64decode
from typing import Any


def unpacked(column: dict[str, str]) -> list[int]:
    """The numbers of a packed column."""
    raw = zlib.decompress(b64decode(column["data"]))
    letter, size = {"i4": ("i", 4), "f8": ("d", 8)}[column["type"]]
    return [int(value) for value in struct.unpack(f"<{len(raw) // size}{letter}", raw)]


def page_data(page: str) -> dict[str, Any]:
    """What the viewer reads in a page."""
    return dict(json.loads(page.split('id="data">')[1].split("</script>")[0]))
