"""Names of the core's types."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
_NAMESPACE = re.compile(r"^(?:inline )?namespace ?([\w:]*) ?\{")
_TYPE = re.compile(r"^(?:struct|class|enum class) ([\w:]+)[^;]*\{")


def test_no_two_headers_define_a_type_of_the_same_name() -> None:
    """The linker keeps one of two functions of the same name, such as a vector's push_back of that type, and
    the code of the other type then writes beyond its memory. No compiler says so."""
    where: dict[str, list[str]] = defaultdict(list)
    for header in sorted([*NATIVE.glob("src/*.h"), *NATIVE.glob("bindings/*.h")]):
        inside: list[str] = []
        for line in header.read_text().splitlines():
            if match := _NAMESPACE.match(line):
                inside.append(match[1])
            elif line.startswith("}  // namespace"):
                inside.pop()
            elif match := _TYPE.match(line):
                where["::".join([*inside, match[1]])].append(header.name)
    assert len(where) > 50, "the headers are not written as they were"
    assert {name: headers for name, headers in where.items() if len(headers) > 1} == {}
