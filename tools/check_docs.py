"""Checks the claims that the documentation makes about the repository: README, CONTRIBUTING, all pages.

1. A relative link leads to a file that exists, and an anchor to a heading of it.
2. A path in code quotes that starts with a folder of the repository exists. `path.py::Class.method` also
   names a class or function that the file defines.
3. A `monolith ...` command is one of the command table, with flags it takes. In text, `list | inspect`
   means several commands; in a block of shell, `|` and `>` end the command. `...` means omitted words.
4. Every page of docs/decisions has one row in the table of its README, and every row a page.
5. A figure of the README names the command that measures it: its row of a table, or its paragraph. Figures of
   a table are in benchmarks/README.md too, under that command: there is one source.
6. A field of a run's config in code quotes, such as `train.save.steps`, exists under that name.
7. A feature is called missing ("not yet", "planned", "not implemented") only on the pages and in the source
   files of `MISSING`, so that a feature built since is not called missing.
8. A dotted name in code quotes, such as `monolith.table.Table`, is a module of ours or a name it defines.

Prints `path:line: message` for each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
FIGURES = "benchmarks/README.md"

DECISION_ROW = re.compile(r"^\| \[(?P<number>\d+)\]\((?P<page>[^)]+)\)", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?(monolith(?: .*)?)$")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w.,]*\d)")
RATE = re.compile(r"(?<![\w.,])\d[\d,.]* ?(?:[kMG] ?)?(?:[a-zA-Z]+/s|ms|GB|MB)\b")
"""What is measured and could be another number tomorrow: so many things a second, milliseconds, bytes."""
BENCH = re.compile(r"`(monolith bench \w+)[^`]*`")
SOURCE_OF_FIGURES = re.compile(r"`(monolith bench \w+|make demo|make bench)[^`]*`")


FIELD = re.compile(r"`(?:--)?(?P<path>[a-z_]+(?:\.[a-z_-]+)+)(?=[` =])")
FILE_ENDINGS = ("py", "md", "toml", "json", "jsonl", "csv", "parquet", "txt")
LATER = re.compile(
    r"\bnot (?:(?:built|implemented|supported|tested|available|there) )?yet\b"
    r"|\b(?:is|are) planned\b|\bnot (?:built|implemented)\b|\bcoming soon\b"
    r"|\bin a (?:later|future) (?:version|release)\b",
    re.IGNORECASE,
)
CANNOT_YET = re.compile(
    r"\bnot (?:(?:built|implemented|supported|available) yet|implemented)\b"
    r"|\bcannot (?!be )[^.:;\n]{1,60} yet\b",
    re.IGNORECASE,
)
"""Narrower than `LATER`: in source files, "not started yet" speaks of a state and is no claim."""
MISSING = {
    "docs/scale.md": "a limit that is not reached yet",
    "docs/seed-map.md": "compared with the code by tests/tools/test_seed_map.py",
    "src/monolith/runtime/fleet_placement.py": "several processes cannot roll back together after an alert",
}
"""Page or source file -> why it may call something missing. Decisions may, too: they describe their day."""
NO_MODULES = {
    "monolith.commands": "a group of entry points",
    "monolith.crc32c": "a key in the metadata of a file",
    "monolith.shared": "a key in the metadata of a file",
}
"""Dotted names that are not modules -> what they are."""
DOTTED = re.compile(r"`(?P<name>monolith(?:_bench|_compat)?(?:\.\w+)+)(?=[`(])")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class Page:
    """One page, with its code blocks blanked out in `prose`: offsets and lines are those of `text`."""

    path: str
    text: str

    @property
    def prose(self) -> str:
        return FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), self.text)

    def finding(self, offset: int, message: str) -> Finding:
        return Finding(self.path, self.text.count("\n", 0, offset) + 1, message)


def check(root: Path) -> list[Finding]:
    """Return all findings in the repository at this folder, in order."""
    pages = [
        Page(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for pattern in PAGES
        for path in sorted(root.glob(pattern))
    ]
    findings = [
        finding
        for page in pages
        for found in (
            check_links(page, root),
            check_paths(page, root),
            check_commands(page),
            check_fields(page),
            check_missing(page),
            check_names(page, root),
        )
        for finding in found
    ]
    findings += [found for path in sorted(root.glob("src/**/*.py")) for found in check_messages(path, root)]
    readme = next((page for page in pages if page.path == "README.md"), None)
    source = next((page for page in pages if page.path == FIGURES), Page(FIGURES, ""))
    figures = check_figures(readme, source) if readme else ()
    return sorted([*findings, *check_decisions(pages), *figures])


# 1. Links


def check_links(page: Page, root: Path) -> Iterator[Finding]:
    prose = QUOTED.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page.prose)
    for link in LINK.finditer(prose):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (root / page.path).parent / target if target else root / page.path
        if not path.exists():
            yield page.finding(link.start(), f"the link {link['target']} leads nowhere: there is no {target}")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield page.finding(link.start(), f"the link {link['target']} leads nowhere: no heading #{anchor}")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    return {
        re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower()))
        for _, title in HEADING.findall(FENCE.sub("", text))
    }


# 2. Paths


def check_paths(page: Page, root: Path) -> Iterator[Finding]:
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    for code in QUOTED.finditer(page.prose):
        path = code[1].partition("::")[0].rstrip("/")
        if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)+", path) and path.split("/")[0] in folders - {"build"}:
            found = any(root.glob(path)) if "*" in path else (root / path).exists()
            if not found:
                yield page.finding(code.start(), f"there is no {path}")
            elif path.endswith(".py") and "::" in code[1] and path.startswith("src/"):
                name = code[1].partition("::")[2]
                if not defines(root / path, name.split(".")):
                    yield page.finding(code.start(), f"{path} does not define {name}")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defines(path: Path, names: Sequence[str]) -> bool:
    """Return whether a Python file defines a name, or a class whose body defines the rest of a dotted one."""
    body: Sequence[ast.stmt] = parsed(path).body
    for name in names:
        found = [one for one in body if name in names_of(one)]
        if not found:
            return False
        body = found[-1].body if isinstance(found[-1], ast.ClassDef) else []
    return True


def names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {statement.name}
        case ast.Import() | ast.ImportFrom():
            return {one.asname or one.name for one in statement.names}
        case ast.Assign():
            return {
                one.id
                for target in statement.targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name)
            }
        case ast.AnnAssign(target=ast.Name(name)):
            return {name}
        case ast.If() | ast.Try():
            return set().union(*(names_of(one) for one in statement.body))
    return set()


# 3. Commands


def check_commands(page: Page) -> Iterator[Finding]:
    for offset, command in commands_of(page):
        for problem in problems_of(command):
            yield page.finding(offset, f"`{command}`: {problem}")


def commands_of(page: Page) -> Iterator[tuple[int, str]]:
    """Yield each command that a page names, one at a time."""
    for code in QUOTED.finditer(page.prose):
        words = code[1].replace("\n", " ").replace("\\|", "|")
        if COMMAND.match(words):
            for command in spread(words):
                yield code.start(), command
    for block in FENCE.finditer(page.text):
        if block[1] in ("", "sh", "shell", "bash", "console"):
            for line in re.finditer(r".+", block[2]):
                if found := COMMAND.match(line[0]):
                    yield block.start(2) + line.start(), re.split(r" [|>&;] ?| # |  +#", found[1])[0].strip()


def spread(command: str) -> list[str]:
    """Return the commands that `monolith data head | stats` stands for."""
    first, *others = command.split(" | ")
    stem = first.split()[:-1]
    return [first, *(" ".join([*stem, other]) for other in others)]


def problems_of(command: str) -> Iterator[str]:
    """Yield what is wrong with a command line: its name, or a flag that it does not take."""
    from monolith.cli.main import commands_under, find_command, shared_parser, split_command
    from monolith.cli.options.flags import split_run_flags
    from monolith.errors import ConfigError

    words = shlex.split(command, comments=True)[1:]
    shared = {name for action in shared_parser()._actions for name in action.option_strings}
    rest = [word for word in words if word not in {*shared, "--help", "..."}]
    if not rest or commands_under([word for word in rest if word.islower() and word[0] != "-"]):
        return  # `monolith --help`, `monolith bench NAME`
    try:
        name, arguments = split_command(rest)
    except ConfigError as unknown:
        yield str(unknown)
        return
    own = {"help", *flag_names(find_command(name).options)}
    if find_command(name).run_flags:
        arguments, _ = split_run_flags(arguments, own)
    for word in arguments:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag.removeprefix("--").replace("-", "_") not in own:
            yield f"`monolith {name}` has no flag {flag}"


@cache
def flag_names(options: type) -> frozenset[str]:
    """Return the fields of a command's options, and of options that are part of them."""
    hints = get_type_hints(options)
    inner = [kind for hint in hints.values() for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    own = {field.name.rstrip("_") for field in fields(as_dataclass(options))}  # from_ is --from
    return frozenset(own.union(*(flag_names(kind) for kind in inner if isinstance(kind, type))))


def as_dataclass(options: type) -> Any:
    assert is_dataclass(options)
    return options


# 4. Decisions


def check_decisions(pages: list[Page]) -> Iterator[Finding]:
    """Compare the pages of decisions with the rows of the table that lists them."""
    folder = "docs/decisions/"
    table = next((page for page in pages if page.path == f"{folder}README.md"), None)
    decisions = {page.path for page in pages if page.path.startswith(folder) and page is not table}
    listed = [] if table is None else list(DECISION_ROW.finditer(table.text))
    counts = Counter(f"{folder}{row['page']}" for row in listed)
    for path in sorted(decisions):
        if counts[path] != 1:
            yield Finding(path, 1, f"it has {counts[path]} rows in {folder}README.md, and needs one")
    for row in listed:
        if f"{folder}{row['page']}" not in decisions or not row["page"].startswith(row["number"]):
            assert table is not None
            yield table.finding(row.start(), f"the row of {row['number']} leads to {row['page']}")


# 5. Figures


def check_figures(readme: Page, source: Page) -> Iterator[Finding]:
    prose = readme.prose
    for paragraph in re.finditer(r"(?:.+\n?)+", prose):
        if not paragraph[0].lstrip().startswith("|"):
            if (found := RATE.search(paragraph[0])) and not SOURCE_OF_FIGURES.search(paragraph[0]):
                yield readme.finding(
                    paragraph.start() + found.start(), f"{found[0]} names no command that gives it"
                )
            continue
        for row in re.finditer(r"^\|.*$", paragraph[0], re.MULTILINE):
            yield from check_row(row[0], paragraph.start() + row.start(), readme, source)


def check_row(row: str, offset: int, readme: Page, source: Page) -> Iterator[Finding]:
    """Check one row of a table of the README."""
    bench = BENCH.search(row)
    if bench is None:
        if found := RATE.search(row):
            yield readme.finding(offset, f"{found[0]} names no command that gives it")
        return
    section = section_of(source.text, bench[1])
    if not section:
        yield readme.finding(offset, f"{source.path} has no heading with `{bench[1]}`")
        return
    there = set(NUMBER.findall(section))
    for figure in NUMBER.findall(QUOTED.sub("", row)):
        if figure not in there:
            yield readme.finding(offset, f"{figure} does not stand in {source.path} under `{bench[1]}`")


def section_of(text: str, command: str) -> str:
    """Return what stands under the heading that is this command; nothing where there is none."""
    headings = [found for found in HEADING.finditer(text) if f"`{command}`" in found[2]]
    if not headings:
        return ""
    begin = headings[-1]
    after = [found for found in HEADING.finditer(text, begin.end()) if len(found[1]) <= len(begin[1])]
    return text[begin.end() : after[0].start() if after else len(text)]


# 6. Fields


def check_fields(page: Page) -> Iterator[Finding]:
    """Yield the quoted fields of a run's config that do not exist. Decisions keep the names of their day."""
    if page.path.startswith("docs/decisions/"):
        return
    known, groups = config_paths()
    for match in FIELD.finditer(page.prose):
        path = match["path"].replace("-", "_")
        is_file = path.rpartition(".")[2] in FILE_ENDINGS
        if path.partition(".")[0] in groups and path not in known and not is_file:
            yield page.finding(match.start(), f"`{path}` is no field of a run's config")


@cache
def config_paths() -> tuple[frozenset[str], frozenset[str]]:
    """Return the dotted paths of a run's fields and tables, and the groups whose fields are all known."""
    from monolith.config.fields import describe_fields
    from monolith.runtime.config import RunConfig

    fields_of_run = [info.path for info in describe_fields(RunConfig)]
    known = {path.rsplit(".", above)[0] for path in fields_of_run for above in range(path.count(".") + 1)}
    return frozenset(known), frozenset(path.partition(".")[0] for path in fields_of_run if "." in path)


# 7. Missing features


def check_missing(page: Page) -> Iterator[Finding]:
    if page.path in MISSING or page.path.startswith("docs/decisions/"):
        return
    for match in LATER.finditer(page.prose):
        yield page.finding(
            match.start(), f'"{match[0]}": is it still missing? If so, add the page to MISSING of the check'
        )


def check_messages(path: Path, root: Path) -> Iterator[Finding]:
    """Check the strings of a source file: an error or a help text that calls a feature missing."""
    name = path.relative_to(root).as_posix()
    if name in MISSING or name.endswith("_pb2.py") or not CANNOT_YET.search(path.read_text(encoding="utf-8")):
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in CANNOT_YET.finditer(node.value):
                yield Finding(
                    name, node.lineno, f'"{match[0]}": is it still missing? If so, add the file to MISSING'
                )


# 8. Names


def check_names(page: Page, root: Path) -> Iterator[Finding]:
    """Yield the dotted names that no module defines. Decisions keep the names of their day."""
    if page.path.startswith("docs/decisions/"):
        return
    for match in DOTTED.finditer(page.prose):
        if match["name"] in NO_MODULES:
            continue
        if problem := missing_name(root / "src", match["name"].split(".")):
            yield page.finding(match.start(), f"`{match['name']}`: {problem}")


def missing_name(source: Path, names: Sequence[str]) -> str | None:
    """Return why a dotted name does not exist; None if it does."""
    place = source / names[0]
    if not place.is_dir():
        return None  # a repository without our packages, or a name of another one
    for depth, name in enumerate(names[1:], 1):
        if (place / name).is_dir():
            place = place / name
        elif (place / f"{name}.py").is_file():
            rest = names[depth + 1 :]
            return (
                None
                if not rest or defines(place / f"{name}.py", rest[:1])
                else f"{name}.py does not define {rest[0]}"
            )
        else:
            doors = [place / door for door in ("__init__.pyi", "__init__.py") if (place / door).is_file()]
            if any(defines(door, [name]) for door in doors):
                return None
            return f"{'.'.join(names[:depth])} has no {name}"
    return None


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    findings = check(root)
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
