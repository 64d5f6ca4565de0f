"""The audit file: bytes read by each decode step of a server, and the error of its attention.

A server writes it if the option `audit` names a file; `read` follows it. The file is a sequence of arrays in numpy's
own format (`numpy.save`), one per decode step, each with a record per (layer, request).
"""

from __future__ import annotations

import io
import math
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np

SPEC_BYTES = 32
"""Bytes of a policy's spec in a record."""

_MAGIC = b"\x93NUMPY"


def record_dtype(q_heads: int) -> np.dtype:
    """The record of a layer of a request in a decode step.

    policy: spec of the request's policy, cut at SPEC_BYTES. layer: index. length: tokens of the request, this step's
    included. middle: tokens that are not resident. tile_bytes: bytes of K and V of the middle that were read, summed
    over groups. For selected blocks it counts whole tiles, once for all heads of a group; for single tokens (`oracle`)
    the rows attended to, not the keys scanned to find them. It includes what the policy itself read. metadata_bytes:
    block metadata
    scanned. kv_bytes: K and V of the whole middle, all groups. error [q_heads]: ||o_h - o_h_full||_2 /
    max_h' ||o_h'_full||_2 of every query head (Fluxion, Eq. 2; the maximum is over the layer's heads).
    """
    return np.dtype(
        [
            ("policy", f"S{SPEC_BYTES}"),
            ("layer", "<i4"),
            ("length", "<i4"),
            ("middle", "<i4"),
            ("tile_bytes", "<i8"),
            ("metadata_bytes", "<i8"),
            ("kv_bytes", "<i8"),
            ("error", "<f4", (q_heads,)),
        ]
    )


class AuditLog:
    """Appends arrays to an audit file, which is created if it does not exist.

    An incomplete array at the end of an existing file, left by a killed server, is cut off, because readers could not
    find the arrays after it.

    Args:
        limit: most bytes of the file. If an array would exceed it, the file is renamed to `rotated(path)`, replacing
            the file there, and a new one begins. None: no limit.

    Raises:
        OSError: the file cannot be opened or written.
        ValueError: the file exists and is no audit file.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int | None = None) -> None:
        self._path, self._limit = Path(path).expanduser(), limit
        self._open()

    def _open(self) -> None:
        path = self._path
        # Unbuffered, so that a failed write is not retried later. In append mode, because the reader may empty the file
        # while it is open here.
        self._file = path.open("ab", buffering=0)
        # Pipes and devices cannot be truncated.
        self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if self._regular:
            self._file.truncate(_end_of_whole_arrays(path))

    def append(self, records: np.ndarray) -> None:
        """Append one step. On return the array is in the file; if it raises OSError, none of it is."""
        # In one write, so that a reader seldom sees an incomplete array; numpy writes header and data separately.
        buffer = io.BytesIO()
        np.save(buffer, records, allow_pickle=False)
        rest = buffer.getbuffer()
        end = os.fstat(self._file.fileno()).st_size
        if self._regular and self._limit is not None and end > 0 and end + len(rest) > self._limit:
            os.replace(self._path, rotated(self._path))
            self._file.close()
            self._open()
            end = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if self._regular:
                with suppress(OSError):
                    self._file.truncate(end)
            raise


def rotated(path: Path) -> Path:
    """The path of a full audit file."""
    return path.with_name(path.name + ".1")


def _end_of_whole_arrays(path: Path) -> int:
    """The end of the last complete array of an audit file. Raises ValueError if the file does not begin with one."""
    done = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while done < size:
            file.seek(done)
            start = file.read(len(_MAGIC))
            file.seek(done)
            try:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            except ValueError:
                foreign = not _MAGIC.startswith(start)
            else:
                foreign = dtype.names != record_dtype(1).names
                end = file.tell() + math.prod(shape) * dtype.itemsize
                if not foreign and end <= size:
                    done = end
                    continue
            if foreign and done == 0:
                raise ValueError(f"{path} is a file of another kind; give a new file, or one that an audit began.")
            break
    return done


def read(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[np.ndarray], int]:
    """The arrays that were appended since `offset`, and the offset for the next call.

    An incomplete array, and anything after the last array, is left for the next call. A file that is shorter than the
    offset was rotated, because it had reached its limit, and is read from its start.

    Args:
        offset: 0, or the result of an earlier call.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no array at the offset: it is no audit file, or the offset is wrong.
    """
    with Path(path).expanduser().open("rb") as file:
        if offset > os.fstat(file.fileno()).st_size:
            offset = 0
        file.seek(offset)
        data = io.BytesIO(file.read())
    arrays: list[np.ndarray] = []
    size = data.getbuffer().nbytes
    done = 0
    while done < size:
        start = data.getbuffer()[done : done + len(_MAGIC)].tobytes()
        if not _MAGIC.startswith(start):
            if arrays:
                break
            raise ValueError(f"{path} has no array at byte {offset + done}; give a file that the option audit named.")
        try:
            arrays.append(np.load(data, allow_pickle=False))
        except (ValueError, EOFError):
            break  # an incomplete array
        done = data.tell()
    return arrays, offset + done
