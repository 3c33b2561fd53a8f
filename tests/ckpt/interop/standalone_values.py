"""The values of state.json, by docs/format.md."""

import struct
from argparse import Namespace
from base64 import b64decode
from collections import deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from uuid import UUID

import numpy as np


def clock(kind, text, fold, zone):
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def file(data, position):
    opened = BytesIO(data)
    opened.seek(position)
    return opened


VALUES = {  # of `value`
    "bytearray": bytearray,
    "PosixPath": PosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "date": date.fromisoformat,
    "datetime": lambda parts: clock(datetime, *parts),
    "time": lambda parts: clock(time, *parts),
    "timedelta": lambda parts: timedelta(*parts),
    "timezone": lambda parts: timezone(parts[0]) if parts[1] is None else timezone(*parts),
    "Decimal": Decimal,
    "UUID": UUID,
    "Fraction": lambda parts: Fraction(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "BytesIO": lambda parts: file(*parts),
    "torch.device": str,
    "torch.Size": tuple,
    "array": lambda parts: (*parts,),
}
CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset}  # of `items`


def plain(value):
    """state.json: a value from its JSON form."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict) or "$" not in value:
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
    if value["$"] in VALUES:
        return VALUES[value["$"]](plain(value["value"]))
    if value["$"] in CONTAINERS:
        return CONTAINERS[value["$"]](map(plain, value["items"]))
    raw = bytes.fromhex(value["hex"]) if value["$"] in ("float", "complex") else b64decode(value.get("base64", ""))
    match value["$"]:
        case "deque":
            return deque(map(plain, value["items"]), value["maxlen"])
        case "dict" | "OrderedDict" | "Counter":
            return {plain(key): plain(item) for key, item in value["items"]}
        case "Namespace":
            return Namespace(**{plain(key): plain(item) for key, item in value["items"]})
        case "enum" | "flag" | "namedtuple" | "registered" | "class":
            return value["type"], plain(value["value"])
        case "int":
            return int(value["hex"], 16)
        case "float":
            return struct.unpack(">d", raw)[0]
        case "complex":
            return complex(*struct.unpack(">dd", raw))
        case "str":
            return raw.decode("utf-8", "surrogatepass")
        case "bytes":
            return raw
        case "numpy":
            return np.frombuffer(raw, value["dtype"])[0]
        case "torch.dtype":
            return value["name"]
    raise ValueError(value["$"])
