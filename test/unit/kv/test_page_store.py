"""Pages of KV in files: a read returns what was written, or nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.kv import page_store
from fluxion_sglang.kv.page_store import BadPage, Page, PageStore

PAGE_BYTES = 640
MODEL = {"model": "a"}


def page(seed: int) -> Page:
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def name(i: int) -> str:
    return f"{i * 7919 % 251:02x}{i:062x}"


def store(folder: Path, pages: int = 1000, model: dict[str, str] = MODEL) -> PageStore:
    room = pages * PageStore(folder, model, PAGE_BYTES, 1 << 40).file_bytes
    return PageStore(folder, model, PAGE_BYTES, room)


def read(one: PageStore, names: Sequence[str]) -> dict[int, Page]:
    found: dict[int, Page] = {}
    one.read(names, found.__setitem__)
    return found


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]


def test_what_is_written_comes_back_after_a_restart(tmp_path: Path) -> None:
    first = store(tmp_path)
    names = [name(i) for i in range(200)]
    assert first.leading(names) == 0
    for i, key in enumerate(names):
        first.write(key, page(i))
    first.write(names[0], page(99))  # it exists: pages with one name are equal
    assert len(first) == first.written_pages == 200
    first.close()
    again = store(tmp_path)
    assert len(again) == 200 and again.leading(names) == 200
    assert again.leading([*names[:150], "ff" * 32, *names[150:]]) == 150
    found = read(again, names)
    assert all(np.array_equal(found[i], page(i)) for i in range(200)) and len(found) == 200
    assert again.read_pages == 200 and again.refused_pages == 0


def test_other_models_have_other_folders(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path, model={"model": "b"})
    one.write(name(0), page(0))
    assert other.leading([name(0)]) == 0
    # Moving a file by hand does not help: the checksum includes the folder.
    there = one.folder / name(0)[:2] / name(0)
    moved = other.folder / name(0)[:2] / name(0)
    moved.parent.mkdir(exist_ok=True)
    moved.write_bytes(there.read_bytes())
    assert other.leading([name(0)]) == 0 and other.refused_pages == 1


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_a_file_that_is_not_what_was_written_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pages")
    for i in range(3):
        store(folder).write(name(i), page(i))
    one = store(folder)
    path = one.folder / name(1)[:2] / name(1)
    good = path.read_bytes()
    how = data.draw(st.sampled_from(["flip", "cut", "more", "other", "empty"]))
    if how == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = bytearray(good)
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        bad = bytearray(good[: data.draw(st.integers(0, len(good) - 1))])
    elif how == "more":
        bad = bytearray(good + data.draw(st.binary(min_size=1, max_size=40)))
    else:
        bad = bytearray(b"" if how == "empty" else (one.folder / name(2)[:2] / name(2)).read_bytes())
    path.write_bytes(bad)
    assert one.leading([name(i) for i in range(3)]) == 1
    assert one.refused_pages == 1 and not path.exists(), "it is computed, and written, again"
    one.write(name(1), page(1))
    assert path.read_bytes() == good and one.leading([name(i) for i in range(3)]) == 3


def test_a_file_that_turns_bad_after_it_was_seen_is_not_read(tmp_path: Path) -> None:
    one = store(tmp_path)
    for i in range(2):
        one.write(name(i), page(i))
    assert one.leading([name(0), name(1)]) == 2
    (one.folder / name(1)[:2] / name(1)).write_bytes(b"?")
    with pytest.raises(BadPage, match="not what was written"):
        read(one, [name(0), name(1)])
    (one.folder / name(0)[:2] / name(0)).unlink()  # by another process, which needed room
    with pytest.raises(BadPage, match="cannot be read"):
        read(one, [name(0)])
    assert one.leading([name(0)]) == 0


def test_the_pages_that_were_used_least_recently_make_room_and_of_a_prompt_the_last_first(tmp_path: Path) -> None:
    one = store(tmp_path, pages=10)
    old, shared = [name(i) for i in range(4)], [name(i) for i in range(4, 8)]
    for i, key in enumerate([*shared, *old]):
        one.write(key, page(i))
    one.used(shared, time.time_ns() + (61 << 30))
    one.close()
    one = store(tmp_path, pages=10)  # files remember it
    for i in range(20, 26):  # there is room for two; the other four evict pages
        one.write(name(i), page(i))
    there = {path.name for path in files(tmp_path)}
    assert there.issuperset(shared) and not there.intersection(old)
    one.write(name(26), page(26))
    assert one.leading(shared) == 3, "the end of a prompt is of no use without its beginning"
    assert len(one) == 10 and len(files(tmp_path)) == 10
    for i in range(27, 33):  # pages just found will be read soon
        one.write(name(i), page(i))
    assert len(read(one, shared[:3])) == 3


def test_fewer_than_are_there(tmp_path: Path) -> None:
    one = store(tmp_path)
    for i in range(8):
        one.write(name(i), page(i))
    smaller = store(tmp_path, pages=3)
    assert len(smaller) == len(files(tmp_path)) == 3
    nothing = PageStore(tmp_path, MODEL, PAGE_BYTES, 10)
    nothing.write(name(0), page(0))
    assert len(nothing) <= 1


def test_bad_files_behind_a_bad_one_are_written_again_with_it(tmp_path: Path) -> None:
    one = store(tmp_path)
    names = [name(i) for i in range(200)]
    for i, key in enumerate(names):
        one.write(key, page(i))
    one = store(tmp_path)
    for path in files(tmp_path):
        path.write_bytes(b"?")
    assert one.leading(names) == 0
    for i, key in enumerate(names):
        one.write(key, page(i))
    assert one.leading(names) == store(tmp_path).leading(names) == len(one) == 200


def test_processes_share_a_folder(tmp_path: Path) -> None:
    one, other = store(tmp_path), store(tmp_path)
    one.write(name(0), page(0))
    assert other.leading([name(0)]) == 1
    other.write(name(0), page(0))
    assert other.written_pages == 0 and np.array_equal(read(other, [name(0)])[0], page(0))


def test_what_other_processes_write_counts_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "_LOOK_S", 0.0)
    one, other = store(tmp_path, pages=10), store(tmp_path, pages=10)
    for i in range(9):
        one.write(name(i), page(i))
    assert other.leading([name(0)]) == 1
    other.write(name(20), page(20))
    other.write(name(21), page(21))
    there = {path.name for path in files(tmp_path)}
    assert len(there) == len(other) == 10 and there.issuperset(map(name, (0, 20, 21))), "0 is about to be read"
    (gone,) = {name(i) for i in range(9)} - there
    assert one.leading([gone]) == 0
    one.write(gone, page(0))
    assert len(one) == len(files(tmp_path)) == 10 and other.leading([gone]) == 1


def test_on_a_full_disk_the_oldest_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, replace, most = store(tmp_path), os.replace, 3

    def bounded(source: str, target: Path) -> None:
        if len(files(tmp_path)) > most:  # the new one exists, under another name
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", bounded)
    for i in range(6):
        one.write(name(i), page(i))
    assert len(one) == len(files(tmp_path)) == most
    assert [i for i in range(6) if one.leading([name(i)])] == [3, 4, 5]


def test_what_was_not_written_to_its_end_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = store(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            one.write(name(0), page(0))
    assert len(one) == 0 and files(tmp_path) == [] and one.leading([name(0)]) == 0
    # A killed process leaves a file with another name.
    left = one.folder / "00" / ".killed"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"?" * 100)
    assert len(store(tmp_path)) == 0 and left.exists(), "it may be another process's that is writing now"
    os.utime(left, (time.time() - 7200,) * 2)
    assert len(store(tmp_path)) == 0 and not left.exists()


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    one = store(tmp_path / "new")
    one.write(name(0), page(0))
    for path in [one.folder, *one.folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.folder.chmod(0o755)
    with pytest.raises(PermissionError, match=rf"chmod -R go-rwx {one.folder}"):
        store(tmp_path)


def test_a_group_of_this_process_may_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives the files of a volume to a group of the pod, with write permission."""
    one = store(tmp_path)
    one.folder.chmod(0o2770)
    monkeypatch.setattr(os, "getegid", lambda: one.folder.stat().st_gid + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [one.folder.stat().st_gid])
    store(tmp_path).write(name(0), page(0))
    monkeypatch.setattr(os, "getgroups", list)
    with pytest.raises(PermissionError, match="other users may look into"):
        store(tmp_path)
    one.folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: one.folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user owns"):
        store(tmp_path)


def test_nothing_is_put_after_a_failed_read(tmp_path: Path) -> None:
    """The pages may belong to another request by then."""
    one = store(tmp_path)
    for i in range(6):
        one.write(name(i), page(i))
    (one.folder / name(0)[:2] / name(0)).unlink()
    put: list[int] = []

    def slowly(i: int, _: Page) -> None:
        time.sleep(0.2)
        put.append(i)

    with pytest.raises(BadPage):
        one.read([name(i) for i in range(6)], slowly)
    before = len(put)
    time.sleep(0.5)
    assert len(put) == before == 5


def test_a_file_that_cannot_be_read_is_tried_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = store(tmp_path)
    (one.folder / name(0)[:2] / name(0)).mkdir(parents=True)  # opens as no file
    assert [one.leading([name(0)]) for _ in range(3)] == [0, 0, 0]
    assert sum("cannot be read" in record.message for record in caplog.records) == 1
