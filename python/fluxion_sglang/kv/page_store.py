"""Stores pages of KV in files, so that prefilled prompts survive a restart.

A file has one page, 16 tokens of every layer and KV head of a process, as the host pool stores it. Metadata and moments
are not stored: they are computed from the tiles, bit for bit. A file begins with a checksum of its name and its
contents; a file that does not match is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shlex
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the files; each version has its own folder."""
_SUM = 16  # bytes of a checksum
_READERS = 8
"""Reading threads: files are small, and an NVMe disk needs several concurrent requests."""
_TOUCH_NS = 60 * 10**9
"""Longest delay of a file's modification time behind its last use."""
_LOOK_S = 300.0
"""Longest delay until files of other processes are noticed, in seconds."""
_BATCH = 64
"""Files checked at a time; the search ends after the first batch with a bad file."""

Page = np.ndarray[Any, np.dtype[np.uint8]]


class BadPage(RuntimeError):
    """A file is missing, or does not match its checksum."""


class PageStore:
    """The pages of one model and one process of a server, in a folder that several processes may share.

    Names are SGLang's: each is a hash of all tokens up to the page's last, and of the request's salt. The folder must
    belong to this process's user, and be accessible to at most its own groups, because a page reveals its prompt.

    Args:
        folder: root folder for all models; each manifest has a subfolder.
        manifest: everything beside the tokens that determines a page's bytes. It is also written there, for people.
        page_bytes: bytes of a page.
        limit: most bytes of this manifest's files; the least recently used pages are removed.

    Attributes:
        read_pages, written_pages, refused_pages: pages read for requests, written, and found to be bad.

    Raises:
        OSError: the folder cannot be made or written, or other users have access.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], page_bytes: int, limit: int) -> None:
        text = json.dumps({"format": FORMAT, "page_bytes": page_bytes} | dict(manifest), indent=1, sort_keys=True)
        self.page_bytes, self.limit = page_bytes, limit
        self.read_pages = self.written_pages = self.refused_pages = 0
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(self.folder)
        self._seed = self.folder.name.encode()
        self._lock = threading.Lock()
        # Guarded by _lock: the known files in order of use, least recent first, each with the time of use that is
        # stored in the file system; and the files that this process has read or written.
        self._files: OrderedDict[str, int] = OrderedDict()
        self._sound: set[str] = set()
        self._unreadable: set[str] = set()
        self._looked = 0.0  # used by the writing thread: time of the last scan
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="fluxion-disk")
        self._replace(self.folder / "manifest.json", [text.encode()])
        self._find()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def file_bytes(self) -> int:
        return _SUM + self.page_bytes

    def leading(self, keys: Sequence[str]) -> int:
        """The number of leading pages that exist and are sound. A file new to this process is read to check it.

        The pages count as used, so later writes do not evict them before they are read.
        """
        missing = (i for i, key in enumerate(keys) if not self._exists(key))
        there = keys[: next(missing, len(keys))]
        sound = len(there)
        for start in range(0, len(there), _BATCH):
            batch = there[start : start + _BATCH]
            new = [key for key in batch if key not in self._sound]
            bad = [key for key, good in zip(new, self._readers.map(self._check, new), strict=True) if not good]
            if bad:
                sound = start + batch.index(bad[0])
                break
        with self._lock:
            for key in reversed(there[:sound]):
                if key in self._files:
                    self._files.move_to_end(key)
        return sound

    def read(self, keys: Sequence[str], put: Callable[[int, Page], None]) -> None:
        """Pass each page, [page_bytes] uint8, to put(i, page), on several threads.

        Raises:
            BadPage: a page is bad; others may have been put. No thread calls `put` any more.
        """

        def one(i: int) -> None:
            put(i, self._load(keys[i]))

        futures = [self._readers.submit(one, i) for i in range(len(keys))]
        wait(futures)  # no reader may still write to the pages when the caller frees them
        for future in futures:
            future.result()
        self.read_pages += len(keys)

    def write(self, key: str, page: Page) -> None:
        """Write one page, [page_bytes] uint8, unless a sound one exists. On a full disk it replaces the oldest page.

        Raises:
            OSError: the page cannot be written; an existing file stays.
        """
        if key in self._sound:
            return
        data = np.ascontiguousarray(page).data.cast("B")
        assert len(data) == self.page_bytes
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if time.monotonic() - self._looked > _LOOK_S:
            self._find()
        if key not in self._files:
            self._make_room()
        parts: list[bytes | memoryview] = [self._sum(key, data), data]
        try:
            self._replace(path, parts, key)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._remove_oldest():
                raise
            self._replace(path, parts, key)
        self.written_pages += 1

    def used(self, keys: Sequence[str], now_ns: int | None = None) -> None:
        """Mark pages of one prompt, given in order, as used. The first page is evicted last."""
        now = time.time_ns() if now_ns is None else now_ns
        for i, key in enumerate(reversed(keys)):
            with self._lock:
                if (before := self._files.get(key)) is None:
                    continue
                self._files.move_to_end(key)
                if now - before < _TOUCH_NS:
                    continue
                self._files[key] = now + i
            with suppress(OSError):  # another process has removed it
                os.utime(self._path(key), ns=(now + i, now + i))

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def _find(self) -> None:
        """Scan the folder for files of any process, oldest first, and remove abandoned temporary files."""
        self._looked, began = time.monotonic(), time.time_ns()
        found: list[tuple[int, str]] = []
        for shard in os.scandir(self.folder):
            if not shard.is_dir():
                continue
            for file in os.scandir(shard):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    if not file.name.startswith("."):
                        found.append((status.st_mtime_ns, file.name))
                    elif status.st_mtime < time.time() - 3600:
                        os.unlink(file.path)
        with self._lock:
            before = self._files
            self._files = OrderedDict((name, at) for at, name in sorted(found))
            self._files |= {name: at for name, at in before.items() if at >= began}  # newer than the scan
            # Keep pages at the recent end that were just looked up, whatever their files' times: they will be read.
            for name in list(before)[len(before) * 7 // 8 :]:
                if name in self._files:
                    self._files.move_to_end(name)
            self._sound &= self._files.keys()
            self._unreadable.clear()
        while len(self._files) * self.file_bytes > self.limit:
            self._remove_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _sum(self, key: str, data: memoryview) -> bytes:
        checksum = xxhash.xxh3_128(self._seed + key.encode())
        checksum.update(data)
        return checksum.digest()

    def _load(self, key: str) -> Page:
        """A page's bytes. Raises BadPage, and removes a file that does not match its checksum."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                header, page = bytearray(_SUM), np.empty(self.page_bytes + 1, np.uint8)
                # Read one byte more than expected to detect a file that is too long.
                size = os.readv(file.fileno(), [header, page.data])
                while 0 < size < self.file_bytes:
                    more = os.readv(file.fileno(), [page.data[size - len(header) :]])
                    if more == 0:
                        break
                    size += more
        except OSError as error:
            with self._lock:
                self._forget(key)
                self._unreadable.add(key)
            raise BadPage(f"the file of page {key} cannot be read ({error})") from error
        page = page[: self.page_bytes]
        if size == self.file_bytes and bytes(header) == self._sum(key, page.data):
            with self._lock:
                self._files.setdefault(key, 0)  # another process has written it
                self._sound.add(key)
            return page
        self.refused_pages += 1
        self._remove(key)
        raise BadPage(f"the file of page {key} is not what was written")

    def _exists(self, key: str) -> bool:
        if key not in self._unreadable and os.path.exists(self._path(key)):
            return True
        with self._lock:
            self._forget(key)  # another process has removed it
        return False

    def _check(self, key: str) -> bool:
        try:
            self._load(key)
        except BadPage as error:
            logger.warning("Fluxion: %s; it is computed again", error)
            return False
        return True

    def _make_room(self) -> None:
        while (len(self._files) + 1) * self.file_bytes > self.limit and self._remove_oldest():
            pass

    def _remove_oldest(self) -> bool:
        """Remove the least recently used page; False if there is none."""
        with self._lock:
            key = next(iter(self._files), None)
        if key is not None:
            self._remove(key)
        return key is not None

    def _remove(self, key: str) -> None:
        with self._lock, suppress(OSError):
            self._forget(key)
            os.unlink(self._path(key))

    def _forget(self, key: str) -> None:
        """Drop a page from the index; the caller holds the lock."""
        self._files.pop(key, None)
        self._sound.discard(key)

    def _replace(self, path: Path, parts: Iterable[bytes | memoryview], key: str | None = None) -> None:
        """Write a file atomically: readers see the old or the new one. key: of the page that it contains."""
        handle, beside = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
            with self._lock:
                os.replace(beside, path)
                if key is not None:
                    self._files[key] = time.time_ns()
                    self._sound.add(key)
                    self._unreadable.discard(key)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise


def _check_private(folder: Path) -> None:
    """Raise PermissionError if another user can read a folder. Access for the process's groups is allowed, because
    Kubernetes assigns a volume's files to one of them (fsGroup)."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"another user owns {folder}", str(folder))
    if status.st_mode & (0o007 if status.st_gid in (os.getegid(), *os.getgroups()) else 0o077):
        what = f"other users may look into {folder}; end that with: chmod -R go-rwx {shlex.quote(str(folder))}"
        raise PermissionError(errno.EPERM, what, str(folder))
