"""The files of a Hugging Face model besides its tensors: config.json, and those of a tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConversionError, StorageError

__all__ = ["HfFiles"]

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_NOT_COPIED = (".index.json",)  # of tensors
_MAX_BYTES = 1 << 28


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
