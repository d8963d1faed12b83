"""Count the comments that silence a checker, and fail where one does not say why.

    python3 tools/count_suppressions.py src

The forms are `# type: ignore[code]  # reason` and `# noqa: CODE  # reason`.
"""

import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = {
    "type: ignore": re.compile(r"type:\s*ignore(\[[^\]]*\])?"),
    "noqa": re.compile(r"(?:ruff:\s*|flake8:\s*)?noqa(:\s*[A-Z]+\d+(?:[\s,]+[A-Z]+\d+)*)?"),
    "mypy:": re.compile(r"mypy:\s*([\w-]+(?:=\S+)?)"),
}


class Suppression(NamedTuple):
    """A comment that silences a checker."""

    kind: str
    line: int
    problem: str
    """What the comment lacks; empty when it is in order."""


def suppressions(path: Path) -> Iterator[Suppression]:
    """Yield the suppressions of a file, from its comments and not from its strings."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield from read_comment(token.string, token.start[0])


def read_comment(comment: str, line: int) -> Iterator[Suppression]:
    """Yield the suppressions in one comment; they share the reason that follows.

    >>> [s.problem for s in read_comment("# type: ignore[misc]  # torch has no types here", 1)]
    ['']
    >>> [s.problem for s in read_comment("# type: ignore[misc]", 1)]
    ['gives no reason']
    >>> [s.problem for s in read_comment("# noqa  # everything", 1)]
    ['names no code']
    """
    # A suppression stands at the start of a comment; elsewhere the words are prose.
    parts = [part.strip() for part in comment.split("#")]
    found = [
        (kind, match, part[match.end() :])
        for part in parts
        for kind, pattern in KINDS.items()
        if (match := pattern.match(part))
    ]
    prose = [part for part in parts if not any(p.match(part) for p in KINDS.values())]
    reason = " ".join([*prose, *(rest for _, _, rest in found)])
    for kind, match, _ in found:
        problem = ""
        if match[1] is None:
            problem = "names no code"
        elif not re.search(r"[A-Za-z]{3}", reason):
            problem = "gives no reason"
        yield Suppression(kind, line, problem)


def main(folders: list[str]) -> int:
    """Print the counts and the problems; return the exit code."""
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    problems = []
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    for path in files:
        for kind, line, problem in suppressions(path):
            counts[kind] += 1
            if problem:
                problems.append(f"{path}:{line}: a '{kind}' comment {problem}")
    total = ", ".join(f"{count} '{kind}'" for kind, count in counts.items())
    print(f"{len(files)} files in {' '.join(folders)}: {total}")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    if not files:
        print(f"no Python files in {' '.join(folders) or 'nothing'}", file=sys.stderr)
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
