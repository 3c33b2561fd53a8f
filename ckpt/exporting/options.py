"""The content and form of an export: the arguments of `ckpt.export`, and of exports beside a training job.

`HfFiles` are the files of a Hugging Face model besides its tensors: config.json, and those of a tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, get_args

from ckpt.arguments import duration, whole_number
from ckpt.errors import ConversionError, StorageError

Format = Literal["safetensors", "hf", "torch", "dcp"]

DTYPES = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
"""Dtypes that floating-point tensors can be converted to, by the short names."""

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # of the files of a configuration
_NOT_COPIED = (".index.json",)  # of tensors
_MAX_BYTES = 1 << 28
_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def byte_count(size: int | str) -> int:
    """Return a size such as ``"5GB"`` or ``"500MiB"`` in bytes. ValueError if it is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B|)", str(size).strip().upper())
    number = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        raise ValueError(f"{size!r} is not a size such as 5GB or 500MiB")
    return number


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """The format of an export, and what of a step is in it. The arguments are those of `ckpt.export`.

    Arguments are checked and brought into one form: a full name of the dtype, a number of bytes, and the defaults of
    the format "hf" (``prefix="model"``, ``drop_tied=True``). ValueError, TypeError, ConversionError.
    """

    format: Format = "safetensors"
    prefix: str | None = None
    filter: Sequence[str] = ()
    exclude: Sequence[str] = ()
    dtype: Any = None
    drop_tied: bool | None = None
    max_shard_size: int | str = "5GB"
    config: Any = None

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"format must be one of {', '.join(get_args(Format))}, not {self.format!r}")
        is_hf = self.format == "hf"
        if self.config is not None and not is_hf:
            raise ValueError(f'config is for format="hf"; {self.format} files have no place for it')
        if not isinstance(self.prefix, str | None):
            raise TypeError(f"prefix must be keys joined by '/', or None, not {self.prefix!r}")
        prefix = self.prefix if self.prefix is not None else "model" if is_hf else ""
        self._set("prefix", prefix.replace("/", ".").strip("."))
        self._set("filter", (self.filter,) if isinstance(self.filter, str) else tuple(self.filter))
        self._set("exclude", (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude))
        self._set("dtype", _dtype(self.dtype))
        self._set("drop_tied", is_hf if self.drop_tied is None else self.drop_tied)
        self._set("max_shard_size", byte_count(self.max_shard_size))
        if self.config is not None:
            self._set("config", HfFiles.of(self.config))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ExportOptions(ExportForm):
    """Exports in the background: ``Checkpointer(..., export=ExportOptions("/data/hf", every=1000, format="hf"))``.

    A published step that is a multiple of `every` is exported to ``<directory>/step_<N>``, a directory (a file
    ``.pt`` with the format "torch"), which appears when it is complete, and replaces an earlier export of the same
    step, but never a checkpoint. `directory` is created; it is not a checkpoint root. The other arguments are those of
    `ckpt.export`. An export that takes longer than `timeout`, a timedelta or seconds, is killed.
    """

    directory: str | os.PathLike[str]
    every: int
    timeout: timedelta | float = timedelta(hours=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.directory, str | os.PathLike):
            kind = type(self.directory).__name__
            raise TypeError(f"ExportOptions: directory must be a path, not {self.directory!r:.80} ({kind})")
        whole_number("ExportOptions: every", self.every, unit="steps")
        self._set("timeout", duration("ExportOptions: timeout", self.timeout))
        self._set("directory", os.path.abspath(os.path.expanduser(self.directory)))


def _dtype(dtype: Any) -> str | None:
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    name = DTYPES.get(name, name) if name is not None else None
    if name is not None and name not in DTYPES.values():
        raise ValueError(f"dtype must be bf16, fp16 or fp32, or None, which converts nothing; not {dtype!r}")
    return name


# -- files of a Hugging Face model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HfFiles:
    """Files by name, and a directory of which further ones are read when they are needed."""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    directory: str | None = None

    @classmethod
    def of(cls, config: Any) -> HfFiles:
        """Return the files that `config` means.

        It is a dict, the content of config.json; a directory, from which configuration and tokenizer files are copied;
        or an object with `save_pretrained` or `to_dict`, such as the config of a model or a tokenizer. TypeError for
        anything else, ConversionError for a dict that is not JSON, or a directory without such files.
        """
        if isinstance(config, HfFiles):
            return config
        if isinstance(config, str | os.PathLike):
            found = cls(directory=os.path.abspath(os.path.expanduser(config)))
            if not _names_in(str(found.directory)):
                raise ConversionError(f"{os.fspath(config)} has no files of a configuration, such as config.json")
            return found
        if hasattr(config, "state_dict"):
            raise TypeError(f"config is a {type(config).__name__}, not a configuration; give its `config`")
        if hasattr(config, "save_pretrained"):
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                return cls(_read_all(folder))
        document = config.to_dict() if hasattr(config, "to_dict") else config
        if not isinstance(document, Mapping):
            raise TypeError(
                f"config is a {type(config).__name__}; give a dict, a directory, or an object with save_pretrained or "
                "to_dict"
            )
        try:
            text = json.dumps(dict(document), indent=2, sort_keys=True) + "\n"
        except (TypeError, ValueError) as error:
            raise ConversionError(f"config cannot be written as JSON: {error}") from None
        return cls({"config.json": text.encode()})

    def read(self) -> dict[str, bytes]:
        """Return all files. StorageError."""
        return {**self.contents, **({} if self.directory is None else _read_all(self.directory))}


def _names_in(directory: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise StorageError(f"cannot read the configuration in {directory}: {error.strerror}") from error
    wanted = [name for name in names if name.endswith(_SUFFIXES) and not name.endswith(_NOT_COPIED)]
    return [name for name in wanted if os.path.isfile(os.path.join(directory, name))]


def _read_all(directory: str) -> dict[str, bytes]:
    contents = {}
    for name in _names_in(directory):
        path = os.path.join(directory, name)
        try:
            if os.path.getsize(path) > _MAX_BYTES:
                raise StorageError(f"{path} is larger than a file of a configuration; remove it from the directory")
            with open(path, "rb") as stream:
                contents[name] = stream.read()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return contents
