"""Makes links of the pages that leave docs/ work on the site.

The same Markdown is read in the repository, where `../benchmark/results/x.json` and `../csrc/x.h` are files. On the
site

- a page of PAGES that lies elsewhere is a page like the others,
- result files and pictures that a page links to are copied to `results/`,
- any other file is shown as its path, or is a link into the repository where mkdocs.yml has a `repo_url`.

A link to a file that does not exist stays as it is, so that the strict build refuses it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {
    "README.md": "overview.md",
    "models/needle/README.md": "needle.md",
    "models/needle/fluxion/report.md": "needle-predictor.md",
}
"""Pages outside of docs/, and their names on the site."""

COPIED = ("benchmark/results/", "benchmark/plans.json", "models/needle/fluxion/", "models/needle/heads.json")
"""Where the files lie that the site takes along if a page links to them."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_INDEXED = re.compile(r"(?<=\w)\[(\w+)\]\[(\w+)\]")
"""An array's shape in running text, such as K[16][D], which is no reference."""
_FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add pages and linked files that lie outside of docs/."""
    root = _root(config)
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(root / source)))
    for page in list(files.documentation_pages()):
        if page.abs_src_path is None:
            continue
        for target in _targets(Path(page.abs_src_path), root):
            name = _copied(target)
            if name is not None and (root / target).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links of the site."""
    root = _root(config)
    folder = Path(page.file.abs_src_path).parent

    def replace(match: re.Match[str]) -> str:
        image, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = _repository_path(link, folder, root)
        if target is None:
            return match[0]
        name = _site_name(target)
        if name is not None:
            other = files.get_file_from_path(name)
            if other is not None and other.page is not None and text == posixpath.basename(link):
                text = other.page.title  # in the repository a page is known by its file
            relative = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({relative}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})"
        return text if target in text or "`" in text else f"{text} (`{target}`)"

    return _outside_fences(markdown, lambda text: _INDEXED.sub(r"\\[\1\\]\\[\2\\]", _LINK.sub(replace, text)))


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text with everything changed that is not in a fenced block."""
    parts = _FENCE.split(markdown)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent


def _targets(page: Path, root: Path) -> list[str]:
    links = [match[3] for match in _LINK.finditer(page.read_text(encoding="utf-8"))]
    found = [_repository_path(link, page.parent, root) for link in links]
    return [target for target in found if target is not None]


def _repository_path(link: str, folder: Path, root: Path) -> str | None:
    """The path in the repository of an existing file or folder; None for addresses and what does not exist."""
    if ":" in link or link.startswith("/"):
        return None
    path = Path(os.path.normpath(folder / link))
    return path.relative_to(root).as_posix() if path.exists() and path.is_relative_to(root) else None


def _site_name(target: str) -> str | None:
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return _copied(target)


def _copied(target: str) -> str | None:
    if not target.startswith(COPIED) or Path(target).suffix not in (".json", ".svg", ".png"):
        return None
    return "results/" + target.removeprefix("benchmark/results/")
