"""Checks the English of comments, docstrings, messages and pages against a short list of words.

The list is in `RULES`, each with what to write instead: words for processes that have a name (chief, worker,
rank, client), verbs for which the field has one (resume, retry, pause), nouns that are clauses. Code written
before the list existed still has some of them, so `known_words.txt` keeps a count per file: a count may fall,
never rise, and a new file has none. After removing some, run

    python tools/check_words.py --update

which lowers the counts. Without arguments it prints `path:line: message` for the files whose count rose, and
exits with 1 if there is one; `--all` prints every match.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULES: tuple[tuple[str, str], ...] = (
    (
        r"who(?:m?ever)|nobody|somebody|anybody|everybody",
        "name the process or person: chief, worker, client, operator",
    ),
    (r"(?:those|the one|one|anyone) (?:who|whom)", "name the process or person"),
    (r"the others(?! \w+ed\b)", "name them: the other workers, the remaining files"),
    (r"beside", "write next to, compared with, or in addition to"),
    (r"(?:goes|go|going|went|gone) on", "write continue or resume"),
    (r"(?:goes|go|going|went) back", "write roll back, return or restart"),
    (r"beg[iu]ns? (?:anew|again)|beginning again", "write restart, retry or start over"),
    (r"(?:lets?|letting) go of", "write release or drop"),
    (r"(?:holds?|held|holding) back", "write pause, withhold or exclude"),
    (r"(?:hands?|handed|handing) out", "write assign or distribute"),
    (r"(?:passes|passed|passing) over", "write skip or ignore"),
    (r"hear|hears|heard", "write learn, receive or be notified"),
    (r"(?:stands?|stood|standing) still", "write quiesce or pause"),
    (
        r"None where|(?<=[,;(]) where (?:it|they|there|nothing|no|none|one)",
        "write if, when or unless for a condition",
    ),
    (
        r"what (?:was|were) (?:\w+ed|written|read|sent|lost|held|kept|cut|dealt|given|taken)",
        "write a noun: the saved rows",
    ),
    (r"ids without end", "write unbounded ID vocabularies"),
)
RULE = re.compile(
    "|".join(rf"(?P<r{n}>\b(?:{pattern})\b)" for n, (pattern, _) in enumerate(RULES)), re.IGNORECASE
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/guides/*.md",
    "docs/reference/**/*.md",
    "benchmarks/*.md",
)
SOURCES = ("src/**/*.py", "src/**/*.pyi", "tools/*.py", "examples/**/*.py")
NATIVE = ("native/src/**/*.h", "native/src/**/*.cc", "native/bindings/**/*.cc", "src/**/*.cu", "src/**/*.cuh")
KNOWN = Path("tools/known_words.txt")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each piece of English in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    elif path.suffix in (".py", ".pyi"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string
    else:
        for match in re.finditer(r"//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"", text):
            yield text.count("\n", 0, match.start()) + 1, match[0]


def findings(path: Path) -> list[tuple[int, str]]:
    """Return the line and the message of each match in a file."""
    found = []
    for line, text in prose_of(path):
        for match in RULE.finditer(text):
            advice = RULES[int(str(match.lastgroup)[1:])][1]
            words = " ".join(match[0].split())
            found.append((line + text.count("\n", 0, match.start()), f"{words!r}: {advice}"))
    return found


def known_counts() -> dict[str, int]:
    """Return how many matches each file may have."""
    if not KNOWN.exists():
        return {}
    lines = KNOWN.read_text(encoding="utf-8").splitlines()
    return {path: int(count) for path, count in (line.rsplit(" ", 1) for line in lines)}


def main(arguments: list[str]) -> int:
    known = known_counts()
    patterns = (*PAGES, *SOURCES, *NATIVE)
    paths = [
        path for pattern in patterns for path in sorted(Path().glob(pattern)) if path.name != "check_words.py"
    ]
    found = {path.as_posix(): findings(path) for path in paths}
    if "--update" in arguments:
        lines = [f"{path} {len(items)}\n" for path, items in sorted(found.items()) if items]
        KNOWN.write_text("".join(lines), encoding="utf-8")
        return 0
    every = "--all" in arguments
    rose = {path: items for path, items in found.items() if every or len(items) > known.get(path, 0)}
    out = [f"{path}:{line}: {message}" for path, items in rose.items() for line, message in items]
    if not every:
        counts = {
            path: f"{len(items)} matches, {known.get(path, 0)} are known" for path, items in rose.items()
        }
        out += [f"{path}: {count}; see tools/check_words.py" for path, count in counts.items()]
    sys.stdout.writelines(f"{line}\n" for line in out)
    return int(bool(rose) and not every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
