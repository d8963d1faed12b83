"""The README and the docs say nothing that is not so: their code runs, their commands exist."""

import doctest
import functools
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from rarebit.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
OTHERS = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {README}
PAGES = [README, *sorted(OTHERS)]  # the README even where it is missing: that must fail
LANGUAGES = {"bash", "bibtex", "console", "diff", "json", "python", "text", "toml"}

CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    line: int
    """The number of the block's first line in its page."""
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page; refuse one that does not end, or of unknown language."""
    found, start = [], None
    lines = page.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = re.match(r"\s*```(.*)", line)
        if fence is None:
            continue
        if start is None:
            start, language = number, fence[1].strip()
            # A misspelt language would leave a block out of every check below.
            assert language in LANGUAGES, f"line {number}: a block of language {language!r}"
        else:
            found.append(Block(language, start + 1, "\n".join(lines[start : number - 1]) + "\n"))
            start = None
    assert start is None, f"line {start}: a block that does not end"
    return found


def of_language(page: Path, *languages: str) -> list[Block]:
    return [block for block in blocks(page.read_text("utf-8")) if block.language in languages]


def run_python(page: Path, found: list[Block]) -> None:
    """Run the blocks one after the other in one namespace; those with prompts show their output."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        if block.text.lstrip().startswith(">>>"):
            name = f"{page.name}:{block.line}"
            test = doctest.DocTestParser().get_doctest(
                block.text, namespace, name, str(page), block.line
            )
            doctest.DebugRunner().run(test, clear_globs=False)
            namespace = test.globs
        else:
            # Empty lines in front, so that a traceback shows the line of the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(page), "exec"), namespace)  # noqa: S102  # our own pages


def commands(text: str) -> list[list[str]]:
    """Return the `rarebit` commands of a console block, each as its words.

    >>> commands("$ rarebit train a.toml --seed 3  # a comment")
    [['train', 'a.toml', '--seed', '3']]
    """
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ")  # noqa: PLW2901  # a prompt is not part of the command
        for part in re.split(r"&&|\||;|>", line):
            words = shlex.split(part, comments=True)
            if words[:1] == ["rarebit"]:
                found.append(words[1:])
            elif words[:3] == ["python", "-m", "rarebit"]:
                found.append(words[3:])
    return found


def leading(words: list[str]) -> tuple[str, ...]:
    """Return the words before the first option: the subcommand and its arguments."""
    options = [i for i, word in enumerate(words) if word.startswith("-")]
    return tuple(words[: options[0]] if options else words)


@functools.cache
def help_of(words: tuple[str, ...]) -> str:
    """Return the help of a subcommand; an unknown one is an error."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner().invoke(app, [*words, "--help"], env=environment)
    assert done.exit_code == 0, f"rarebit {' '.join(words)}: {done.output.strip()}"
    return done.output


def unknown_options(words: list[str], help_text: str) -> list[str]:
    """Return the options of a command that its help does not name.

    >>> unknown_options(["train", "--seed=3", "--sed", "3"], "--seed  INTEGER")
    ['--sed']
    """
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    return [
        option
        for option in options
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text)
    ]


def named_targets(page: str) -> set[str]:
    """Return the targets that a page names in code: `make demo`, or a line of a block.

    >>> named_targets("Make sure that `make demo` works.")
    {'demo'}
    """
    spans = re.findall(r"`make ([a-z-]+)", page)
    lines = re.findall(
        r"^(?:\$ )?make ([a-z-]+)", "".join(b.text for b in blocks(page)), re.MULTILINE
    )
    return set(spans + lines)


def test_the_readme_shows_code_on_few_lines():
    assert len(README.read_text("utf-8").splitlines()) <= 150
    assert of_language(README, "python")
    assert [words for b in of_language(README, "console", "bash") for words in commands(b.text)]
    assert named_targets(README.read_text("utf-8"))


@each_page
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = of_language(page, "python")
    if any("from_frame(" in block.text for block in found):
        pytest.importorskip("polars", reason="capability: package polars: it is not installed")
    run_python(page, found)


@each_page
def test_toml_blocks_parse(page):
    for block in of_language(page, "toml"):
        tomllib.loads(block.text)


@each_page
def test_named_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert named_targets(page.read_text("utf-8")) - targets == set()


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page give."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text("utf-8")), re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {f"#{heading.replace(' ', '-')}" for heading in words}


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(
        r"\]\((?!https?://)([^)#]*)(#[^)]+)?\)", CODE.sub("", page.read_text("utf-8"))
    )
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}{anchor}"


@each_page
def test_commands_exist(page):
    for block in of_language(page, "console", "bash"):
        for words in commands(block.text):
            unknown = unknown_options(words, help_of(leading(words)))
            assert unknown == [], f"rarebit {' '.join(words)}"


def test_a_wrong_page_is_caught(tmp_path):
    page = tmp_path / "page.md"

    def raises(error, text, language="python"):
        page.write_text(text)
        with pytest.raises(error):
            run_python(page, of_language(page, language))

    raises(AssertionError, "```python\nx = 1\n")
    raises(AssertionError, "```pyhton\nx = 1\n```\n")
    raises(ZeroDivisionError, "```python\nx = 0\n```\n\n```python\n1 / x\n```\n")
    raises(doctest.DocTestFailure, "```python\n>>> 1 + 1\n3\n```\n")
