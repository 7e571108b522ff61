"""An independent reader of the binary form of points, written from its description in the API's document."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def decode(content: bytes) -> dict[str, Any]:
    assert content[:4] == b"STP1"
    length = int.from_bytes(content[4:8], "little")
    answer = json.loads(content[8 : 8 + length])
    start = 8 + length
    assert start % 8 == 0
    for block in answer["blocks"]:
        for name in ("first", "last", "values", "low", "high"):
            if name in block:
                place = block[name]
                kind = {"float32": "<f4", "float64": "<f8"}[place["type"]]
                count = int(np.prod(place["shape"]))
                array = np.frombuffer(content, kind, count, start + place["offset"])
                block[name] = array.reshape(place["shape"])
    return answer
