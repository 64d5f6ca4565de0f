"""The user pages, and the code blocks in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("models/*/README.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_SEPARATORS = ("&&", "||", ";", "|")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path from the root of the repository. before: the line before the fence.
    """

    page: str
    language: str
    text: str
    before: str


@dataclass(frozen=True)
class Command:
    """A command of an sh block: its words, without redirections and other commands of its line."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(language: str) -> list[Block]:
    """All blocks of a language, page by page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            if match[1] == language:
                before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
                found.append(Block(page.relative_to(ROOT).as_posix(), language, match[2], before))
    return found


def lines(block: Block) -> list[str]:
    """The command lines of an sh block, whole, without comments."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in map(str.strip, joined.splitlines()) if line and not line.startswith("#")]


def commands() -> list[Command]:
    """Every command of every sh block; a line with && or | has several."""
    found = []
    for block in blocks("sh"):
        for line in lines(block):
            words: list[str] = []
            for word in [*_words(line), ";"]:
                if word not in _SEPARATORS:
                    words.append(word)
                elif words:
                    found.append(Command(block.page, _plain(words)))
                    words = []
    return found


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _plain(words: list[str]) -> tuple[str, ...]:
    """The words without a path to the program."""
    return words[0].removeprefix(".venv/bin/"), *words[1:]
