"""Steps whose files another program has copied here, one by one, from a root of the other kind.

    a directory copied to a store     step_00000003/zarr.json ...      a rename had published it
    a store copied to a directory     saves/<save>/zarr.json ..., records/<save>/000.json      its record publishes it

The copy is the same root: both kinds of root list such steps beside their own, and the next owner takes them in. In a
store it creates the records of the steps, whose objects stay where they are. In a directory it renames them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename
from ckpt.storage.documents import INTENT, MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.names import PUBLISHED_STEP, parse_save_name, step_name
from ckpt.storage.records import Record, Records, State
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_reader import has_readers
from ckpt.storage.store_owner import StoreOwnership
from ckpt.storage.store_step import StoreStep
from ckpt.storage.stores.directory import DirectoryStore
from ckpt.storage.stores.interface import Store

_READERS = 16


def _is_save(name: str) -> bool:
    return parse_save_name(name) is not None


_OF_STORE: dict[str, Callable[[str], object]] = {  # folders, and whether a name in them is one of a root in a store
    "readers": _is_save,
    "owner": re.compile(r"\d{8,18}(\.json)?|root\.json|clock|probe-\w+").fullmatch,
    "saves": _is_save,
    "records": _is_save,
}


class CopiedDirectories:
    """The steps in a store that were copied there from a directory. Any thread. Each intent is read once.

    Nothing is listed any more when this process has taken them in: a save asks for the newest step each time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, Record | None] = {}  # by the name of the directory
        self._taken_in = False

    def records(self, recorded: Iterable[Record], *, only: bool) -> list[Record]:
        """Return records for the steps of which the store has none: `recorded` are those that it has.

        One list, and a few reads for each new step. `only` says that the root has no other step: then StorageError
        if there is a step that cannot be taken in, because training must not start from scratch.
        """
        if self._taken_in:
            return []
        names = {each.save.name for each in recorded} | {each.at for each in recorded}
        folders = [name for name in self._store.names("")[0] if PUBLISHED_STEP.fullmatch(name) and name not in names]
        new = [name for name in folders if self._read.get(name) is None]
        if new:
            with ThreadPoolExecutor(min(_READERS, len(new)), "ckpt-copied") as pool:
                self._read |= zip(new, pool.map(self._record, new), strict=True)
        found = [record for name in folders if (record := self._read[name]) is not None]
        if only and folders and not found:
            raise StorageError(
                f"{self._store.place(folders[-1])} has the name of a step, and no {INTENT} and zarr.json of that step: "
                "it was renamed or copied in part. Copy it again, as a whole, or remove it"
            )
        return [record for record in found if record.save.name not in names]

    def take_in(self, records: Records) -> None:
        """Create the records of the steps that have none, the newest first: a restore uses that. For the owner.

        A step of which the root has another save is moved aside.
        """
        self._taken_in = False  # more may have been copied since this process took in the others
        known = records.all()
        own = {each.save.step for each in known if each.is_published}
        for record in reversed(self.records(known, only=False)):
            state: State = "superseded" if record.save.step in own else "published"
            created = records.create(replace(record, state=state))
            if created is not None:
                records.keeps(created)  # a later owner may have removed the step, and forgotten it, since the list
        self._taken_in = True

    def _record(self, folder: str) -> Record | None:
        step = StoreStep(self._store, folder)
        try:
            intent = decode_document(step.read(INTENT, MAX_DOCUMENT_BYTES), INTENT)
        except (CheckpointCorruptError, DamagedFileError):
            return None
        save = parse_save_name(str(intent.get("save")))
        if save is None or step_name(save.step) != folder or self._store.about(f"{folder}/zarr.json") is None:
            return None
        about = self._store.about(f"{folder}/{INTENT}")
        return None if about is None else Record(save, "published", time=about.modified_s, at=folder)


class CopiedObjects:
    """The steps in a directory that were copied there from a store. Any thread.

    Those which the records say to be published, and of which the objects are there.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._store = DirectoryStore(path)

    def are_there(self) -> bool:
        """Return whether objects of a root in a store may be there. One look. They are not looked for behind a link."""
        return files.is_directory(os.path.join(self._path, "saves"), follow=False)

    def steps(self, *, only: bool) -> dict[int, str]:
        """Return the places of the steps.

        `only` says that the root has no other step: then StorageError if there are saves, and no records of them.
        """
        if not self.are_there():
            return {}
        records = self._there(Records(self._store).all())
        if only and not records and (names := self._saves()):
            raise StorageError(
                f"{self._path}/saves has files of saves, such as {names[-1]}, and {self._path}/records says nothing of "
                "them: a root in an object store was copied in part. Copy it again, as a whole, or remove these files"
            )
        return {record.save.step: self._place(record) for record in records if record.is_published}

    def take_in(self, root: str, superseded: str, damaged: str, rest: str) -> None:
        """Rename the steps to what they are in a directory, and all that is left to names in `rest`. For the owner.

        A step of which the root has another save is moved aside. One that is being read keeps its place until the next
        owner comes. Other files are left alone.
        """
        records = Records(self._store).all() if self.are_there() else []
        if not records:
            return
        ownership = StoreOwnership(self._store, self._store)
        newest = ownership.newest()
        saver = ownership.claimer(newest)
        if saver is not None and saver.alive and not ownership.leases(newest).has_left(saver):
            raise StorageError(
                f"process {saver.pid} of this host saves to {self._path} as to an object store (directory://): end it, "
                "or give this job another root"
            )
        left, targets = False, {"superseded": superseded, "damaged": damaged}
        for record in self._there(records):
            place, published = self._place(record), record.is_published
            if not published and record.state not in targets:
                continue
            if has_readers(root, place):
                left = True
                continue
            folder = root if published else targets[record.state]
            directories.make_with_parents(folder)
            target = os.path.join(folder, step_name(record.save.step) if published else record.save.name)
            renamed = directories.rename_directory(place, target)
            if renamed is Rename.TARGET_EXISTS and published:  # the root has another save of this step
                directories.make_with_parents(superseded)
                renamed = directories.rename_directory(place, os.path.join(superseded, record.save.name))
            left |= renamed is Rename.TARGET_EXISTS
        for name, is_of_store in _OF_STORE.items() if not left else ():
            path = os.path.join(self._path, name)
            with contextlib.suppress(StorageError):  # the next owner tries again
                if not os.path.islink(path) and all(map(is_of_store, directories.names_in(path))):
                    directories.rename_directory(path, f"{rest}/{name}-{secrets.token_hex(4)}")

    def _there(self, records: list[Record]) -> list[Record]:
        """Return the records of the saves of which the objects are there."""
        return [record for record in records if not record.at and files.is_directory(self._place(record), follow=False)]

    def _place(self, record: Record) -> str:
        return os.path.join(self._path, record.prefix)

    def _saves(self) -> list[str]:
        return list(filter(_is_save, directories.names_in(os.path.join(self._path, "saves"))))
