import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta

from monolith.config import describe_fields
from monolith.config.fields import argument_docs


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner."""

    on: bool = False
    """Turns it on."""
    wait: timedelta = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Base:
    number: int = 0
    """a number
    for test"""
    inner: Inner = Inner(on=True)


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    number: int = 0
    """another number"""
    names: dict[str, int] = field(default_factory=dict)
    needed: str


def test_each_field_has_its_path_type_default_and_text():
    fields = {info.path: info for info in describe_fields(Base)}
    assert list(fields) == ["number", "inner.on", "inner.wait"]
    assert fields["number"].doc == "a number\nfor test"
    assert (fields["inner.wait"].type_text[:8], fields["inner.wait"].default_text) == ("duration", "5m")
    assert fields["inner.wait"].doc == ""


def test_the_default_is_that_of_its_table():
    fields = {info.path: info for info in describe_fields(Base)}
    assert fields["inner.on"].default is True


def test_a_class_without_a_docstring_a_generic_and_a_factory_are_no_trouble():
    fields = {info.path: info for info in describe_fields(Derived)}
    assert fields["number"].doc == "another number"
    assert (fields["names"].default, fields["names"].type_text) == ({}, "table from str to int")
    assert fields["needed"].default is dataclasses.MISSING
    assert fields["needed"].default_text == ""


def test_arguments_are_described_by_the_docstring_of_their_class() -> None:
    class Tower:
        """A tower.

        Args:
            dim: How wide it is,
                in floats.
            seed, threads: See elsewhere.

        Raises:
            ValueError: no argument.
        """

    assert argument_docs(Tower) == {
        "dim": "How wide it is, in floats.",
        "seed": "See elsewhere.",
        "threads": "See elsewhere.",
    }
    assert argument_docs(object) == {}
