"""The values of state.json, by docs/format.md."""

import struct
from base64 import b64decode

import numpy as np


def plain(value):
    """state.json: a value from its JSON form."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict) or "$" not in value:
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
    raw = bytes.fromhex(value["hex"]) if value["$"] in ("float", "complex") else b64decode(value.get("base64", ""))
    match value["$"]:
        case "tuple":
            return tuple(map(plain, value["items"]))
        case "dict" | "OrderedDict" | "Counter":
            return {plain(key): plain(item) for key, item in value["items"]}
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
