"""Claims of the pages exist and work: links, file names, tables, and every command of an `sh` block."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import plot
import pytest
import tables
from page_commands import PAGES, Command, blocks, commands, lines
from places import ROOT, python

from fluxion_sglang import cli

README_LINES = 130

_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")

# Folders that paths may be relative to; the tour and other pages omit what the section implies.
_BASES = ("", "python", "python/fluxion_sglang", "csrc", "csrc/runtime", "csrc/kernels", "docs", "benchmark", "test")
_TOP = ("python", "csrc", "benchmark", "docs", "test", "models", "build")
_SOURCES = (".py", ".cc", ".h", ".cmake")
# Files that a page asks the reader to write.
_THEIRS = {"taper.py", "test_taper.py"}

RUN_ELSEWHERE = {
    r"make demo": "test/engine/test_demo_served.py::test_make_demo",
    r"python -m sglang\.launch_server ": "test/engine/test_docs_commands.py::test_curl_commands",
    r"SGLANG_CPU_OMP_THREADS_BIND=\S+ python .*--nnodes": "test/engine/test_ranks.py::TestRanks",
    r"pip install mooncake-transfer-engine-non-cuda": "test/engine/test_transfer.py::mooncake",
    r"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1 python ": "test/engine/test_transfer.py::pair",
    r"python -m venv router$": "test/engine/test_router.py",
    r"router/bin/": "test/engine/test_router.py",
    r"make gpu": "test/engine/test_gpu_day_simulated.py",
    r"curl ": "test/engine/test_docs_commands.py::test_curl_commands",
    r"fluxion train ": "test/engine/test_train.py::TestTrain",
    r"fluxion bench quality ": "test/engine/test_quality.py::test_every_policy_is_measured_against_full",
    r"fluxion bench(?! quality)": "test/unit/commands/test_cli.py::test_the_benchmarks_of_a_checkout",
    r"fluxion doctor": "test/unit/commands/test_cli.py",
    r"fluxion ask ": "test/engine/test_ask_served.py",
    r"fluxion explain ": "test/engine/test_explain_served.py",
    r"fluxion try ": "test/engine/test_trial_served.py",
    r"(uv )?pip install (\.|'?\.\[\w+\]'?)$": "test/docs/test_pages.py::test_the_package_installs",
}
"""Commands too heavy for this file, as patterns, with the tests that run them: FILE or FILE::NAME."""

_FILTERS = {"grep", "head", "tail", "cat", "cd", "source"}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", page.read_text())


def test_the_readme_is_short() -> None:
    count = len((ROOT / "README.md").read_text().splitlines())
    assert count <= README_LINES, f"README.md has {count} lines; move something to docs/, {README_LINES} are allowed."


def test_the_tests_that_the_faults_name_are_there() -> None:
    """Every row names a test; a benchmark or a target of make may stand beside it, but a target alone is not enough."""
    tables = (ROOT / "docs" / "dev" / "faults.md").read_text().split("\n\n")
    rows = [row for table in tables if table.startswith("| fault |") for row in table.splitlines()[2:]]
    assert len(rows) > 40
    for row in rows:
        last = row.rstrip("| ").rpartition(" | ")[2]
        named = re.findall(r"`(\w+(?:/\w+)+\.py)(?:::(?:\w+::)?(\w+))?`", last)
        assert named, f"no test: {row}"
        for file, name in named:
            path = ROOT / ("" if file.startswith("benchmark/") else "test") / file
            assert path.exists(), f"there is no {file}: {row}"
            assert not name or f"def {name}(" in path.read_text(), f"{file} has no {name}"
            assert name or file.startswith("benchmark/"), f"a file is no test: {row}"


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub and the site generate them."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        text = _LINK.sub(lambda match: match[0][1 : match[0].index("]")], heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def test_links_resolve() -> None:
    """Local links name existing files and sections."""
    wrong = []
    for page in PAGES:
        for link in _LINK.findall(prose(page)):
            if "://" in link or link.startswith("mailto:"):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                wrong.append(f"{page_id(page)}: {link}: there is no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                has = ", ".join(sorted(anchors(target)))
                wrong.append(f"{page_id(page)}: {link}: {target.name} has no such section; it has {has}")
    assert not wrong, "\n".join(wrong)


@cache
def source_names() -> set[str]:
    names = {path.name for top in ("python", "csrc", "benchmark", "test") for path in (ROOT / top).rglob("*")}
    return names | {path.name for path in ROOT.iterdir()}


def missing_path(text: str) -> bool:
    """Whether this inline code looks like a path of the repository but does not exist."""
    text = text.partition("::")[0]
    if not _PATH.fullmatch(text) or text in _THEIRS:
        return False
    source = text.endswith(_SOURCES)
    if "/" not in text:
        return source and text not in source_names()
    if text.split("/")[0] not in _TOP and not source:
        return False
    if text.startswith("build/"):
        return False
    return not any((ROOT / base / text).exists() for base in _BASES)


def test_file_names_exist() -> None:
    wrong = [f"{page_id(page)}: {text}" for page in PAGES for text in _CODE.findall(prose(page)) if missing_path(text)]
    assert not wrong, "these look like files of the repository and are none:\n" + "\n".join(wrong)


def test_what_counts_as_a_missing_file() -> None:
    there = ["csrc/engine/engine.h", "engine/engine.h", "engine.h", "test/unit/house/test_house.py::test_x"]
    other = ["MODEL/fluxion", "fluxion doctor"]
    missing = ["csrc/runtime/no_such.h", "no_such.py", "docs/no_such"]
    assert [text for text in [*there, *other, *missing] if missing_path(text)] == missing


def test_lists_begin_after_an_empty_line() -> None:
    """Without one, the site shows the items as running text."""
    wrong = []
    for page in PAGES:
        before = ""
        for line in prose(page).splitlines():
            if re.match(r"([-*]|\d+\.) ", line) and before.strip() and not re.match(r"([-*]|\d+\.) |\s", before):
                wrong.append(f"{page_id(page)}: {line}")
            before = line
    assert not wrong, "put an empty line before:\n" + "\n".join(wrong)


def test_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python benchmark/tables.py --check` here, in a process that has already imported its modules."""
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()


def test_the_first_picture_is_of_the_results_that_are_there() -> None:
    results = [json.loads(path.read_text()) for path in plot.SHOWN]
    assert plot.origin(*results) in plot.OVERVIEW.read_text(), "python benchmark/plot.py draws it anew"


# Commands


@cache
def all_commands() -> list[Command]:
    return commands()


def of(*programs: str) -> list[Command]:
    return [command for command in all_commands() if command.words[: len(programs)] == programs]


def scripts() -> dict[tuple[str, ...], set[str]]:
    """Python programs of the repository that pages start, with the options that pages give them."""
    found: dict[tuple[str, ...], set[str]] = {}
    for command in of("python"):
        words = command.words[1:]
        name = words[:2] if words[0] == "-m" else words[:1]
        if name[-1].endswith(".py") or name[-1] == "benchmark":
            given = {word.partition("=")[0] for word in words[len(name) :] if word.startswith("--")}
            found.setdefault(tuple(name), set()).update(given)
    return found


def test_the_pages_have_commands() -> None:
    """Otherwise the tests below would pass on nothing."""
    assert len(all_commands()) > 20 and of("fluxion") and of("make") and of("curl") and scripts()


def test_every_command_is_known() -> None:
    unknown = []
    for command in all_commands():
        direct = (
            command.words[0] in {"make", *_FILTERS}
            or str(command) == "fluxion options"
            or any(command.words[1 : 1 + len(name)] == name for name in scripts())
        )
        if not direct and not any(re.match(pattern, str(command)) for pattern in RUN_ELSEWHERE):
            unknown.append(f"{command.page}: {command}")
    assert not unknown, (
        "no test runs these commands; write one and name it in RUN_ELSEWHERE of test/docs/test_pages.py, or take the "
        "command off the page:\n" + "\n".join(unknown)
    )


def test_the_tests_that_run_commands_exist() -> None:
    wrong = []
    for pattern, test in RUN_ELSEWHERE.items():
        file, _, name = test.partition("::")
        path = ROOT / file
        if not path.is_file() or (name and not re.search(rf"^(def|class) {name}\b", path.read_text(), re.M)):
            wrong.append(f"{test}, which is to run {pattern!r}, does not exist")
        if not any(re.match(pattern, str(command)) for command in all_commands()):
            wrong.append(f"no page has a command like {pattern!r}; take it out of RUN_ELSEWHERE")
    assert not wrong, "\n".join(wrong)


def test_make_targets() -> None:
    for command in set(of("make")):
        run = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{command.page}: {command}: {run.stderr}"


def test_fluxion_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Subcommands, options and values are legal; words in capitals stand for the reader's values."""
    for command in of("fluxion"):
        try:
            arguments = cli._parser().parse_args(command.words[1:])
        except SystemExit as end:
            assert end.code == 0, f"{command.page}: {command}: {capsys.readouterr().err}"
        else:
            assert callable(arguments.run), f"{command.page}: {command}"


def test_fluxion_options_in_running_text_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Options such as `fluxion train --sinks` in a sentence exist for that subcommand."""
    found = set()
    for page in PAGES:
        for code in _CODE.findall(prose(page)):
            if match := re.match(r"fluxion (bench quality|\w+) ", code):
                found |= {(page_id(page), match[1], option) for option in re.findall(r"(?<= )--[\w-]+", code)}
    assert found
    for name, command, option in sorted(found):
        with pytest.raises(SystemExit) as end:
            cli._parser().parse_args([*command.split(), "--help"])
        assert end.value.code == 0, f"{name}: there is no command fluxion {command}"
        assert re.search(rf"{option}\b", capsys.readouterr().out), f"{name}: fluxion {command} has no {option}"


def test_cheap_fluxion_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["options"], ["--help"], ["--version"], ["bench", "--help"]):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        assert code == 0 and capsys.readouterr().out.strip(), words


@pytest.mark.full
@pytest.mark.parametrize("name", scripts(), ids=" ".join)
def test_scripts_have_the_options_that_pages_give(name: tuple[str, ...]) -> None:
    if name[-1].endswith(".py") and not re.search(r"\.parse_(known_)?args\(", (ROOT / name[-1]).read_text()):
        # Running it would do its work, so only compile it.
        assert not scripts()[name], f"{name[-1]} takes no options"
        compile((ROOT / name[-1]).read_text(), name[-1], "exec")
        return
    run = subprocess.run([sys.executable, *name, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lacking = [option for option in scripts()[name] if not re.search(rf"{option}\b", run.stdout)]
    assert not lacking, f"{' '.join(name)} has no {', '.join(lacking)}"


@pytest.mark.full
def test_servers_have_the_options_that_pages_give() -> None:
    """Check with SGLang's own parser, with the plug-in's options, and the plug-in's parser for --fluxion-config."""
    code = """
import argparse, json, sys
from fluxion_sglang.sglang.start.options import options_of
from sglang.srt.server_args import ServerArgs
for words in json.load(sys.stdin):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(words)
    options_of(found)
    assert found.enable_fluxion, words
"""
    launched = [list(command.words[3:]) for command in of("python", "-m", "sglang.launch_server")]
    assert launched
    run = python("-c", code, input=json.dumps(launched))
    assert run.returncode == 0, run.stderr[-2000:]


def test_extras_that_pages_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {name for page in PAGES for name in re.findall(r"pip install '?\.\[(\w+)\]", page.read_text())}
    assert named and named <= set(project["optional-dependencies"])


@pytest.mark.full
def test_it_installs_where_other_packages_are_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package can register a setuptools hook that cannot be imported before everything is installed."""
    source, environment = tmp_path / "source", tmp_path / "environment"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, source, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    broken = site / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[egg_info.writers]\nbroken.lock = missing_module:write\n")
    install = runpy.run_path(str(ROOT / "tools" / "install.py"))
    packages = install["packages"]
    monkeypatch.setitem(packages.__globals__, "VENV", environment)
    monkeypatch.setitem(install["Task"].__init__.__globals__, "ROOT", source)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert uv, "uv is missing; `make test-all` installs it"
    python = environment / "bin" / "python"
    task = packages([uv, "pip", "install", "--python", str(python), "--no-deps"], "")
    assert task.process.wait(timeout=300) == 0, task.log.read_text()
    found = subprocess.run(
        [python, "-c", "import fluxion_sglang as f; print(f.__file__)"], capture_output=True, text=True
    )
    assert found.stdout.startswith(str(source)), found.stdout + found.stderr


@pytest.mark.full
def test_the_package_installs(tmp_path: Path) -> None:
    """`pip install .` into a separate folder, without dependencies, builds and finds the library."""
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, source, ignore=ignored)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert uv, "uv is missing; `make test-all` installs it"
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "FLUXION_CUDA": "off", "MAX_JOBS": "2"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    run = subprocess.run(
        [*command, "--target", str(site), "."], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    check = "import fluxion_sglang.native as n; print(n.library_path()); n.library()"
    run = python("-c", check, cwd=tmp_path, env={"PYTHONPATH": str(site)})
    assert run.returncode == 0 and str(site) in run.stdout, run.stdout + run.stderr


def test_python_blocks_are_run_by_a_test() -> None:
    """test_policy_doc.py runs the examples of files; test_docs_commands.py runs programs for a server or an engine."""
    unknown = [
        f"{block.page}: {block.text.splitlines()[0]}"
        for block in blocks("python")
        if not block.before.startswith("<!-- example:")
        and "localhost:30000" not in block.text
        and "sglang.Engine(" not in block.text
    ]
    assert not unknown, (
        "no test runs these python blocks; have them use localhost:30000 or sglang.Engine, or write a test and name "
        "the block here:\n" + "\n".join(unknown)
    )


@pytest.mark.full
def test_the_site_builds(tmp_path: Path) -> None:
    """The strict build fails on links and sections that do not exist."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed; `make docs` does that")
    words = ("mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    run = python("-m", *words, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    foreign = [
        page.name
        for page in tmp_path.rglob("*.html")
        if re.search(r'<(script|link rel="stylesheet"|img)[^>]+(src|href)="https?://', page.read_text())
    ]
    assert not foreign, f"these pages load something from the network: {', '.join(foreign)}"


def test_blocks_are_read_as_a_shell_reads_them() -> None:
    """Continued lines, comments and pipes, on a page that has all three."""
    curl = [line for block in blocks("sh") for line in lines(block) if line.startswith("curl")]
    assert any("-d" in line for line in curl), "continued lines are not joined"
    assert ("grep", "^fluxion_") in {command.words for command in all_commands()}
    assert not any("#" in word for command in of("make") for word in command.words)
