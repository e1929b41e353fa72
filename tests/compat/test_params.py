import copy
import textwrap
from enum import Enum, IntEnum

import pytest
import torch

from monolith.config import UniqueNames
from monolith.errors import ConfigError, FrozenParamsError, InvalidParamError, UnknownParamError
from monolith_compat import (
    InstantiableParams,
    Params,
    allowed_kwargs,
    copy_params_to,
    params,
    update_params,
    with_params,
)


def bag(**values) -> Params:
    made = Params()
    for name, value in values.items():
        made.define(name, value, f"about {name}")
    return made


# Defining, getting, setting


def test_a_defined_parameter_reads_as_attribute_and_item():
    p = bag(steps=3)
    assert p.steps == p["steps"] == p.get("steps") == 3
    assert p.describe("steps") == "about steps"


@pytest.mark.parametrize("name", [None, "", "_foo", "Foo", "1foo", "foo$"])
def test_odd_names_are_rejected(name):
    with pytest.raises(AssertionError, match="lower-case"):
        Params().define(name, 1, "")


def test_a_name_that_is_a_method_is_rejected():
    with pytest.raises(InvalidParamError, match="method"):
        Params().define("copy", 1, "")


def test_defining_twice_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^Parameter foo is already defined$"):
        bag(foo=1).define("foo", 2, "")


def test_only_defined_names_can_be_set():
    p = bag(foo=1)
    p.foo = 2
    p["foo"] = 3
    assert p.set(foo=4) is p
    assert p.foo == 4
    for change in (
        lambda: setattr(p, "bar", 1),
        lambda: p.__setitem__("bar", 1),
        lambda: p.set(bar=1),
        lambda: p.bar,
        lambda: p["bar"],
        lambda: p.get("bar"),
        lambda: p.delete("bar"),
        lambda: p.describe("bar"),
    ):
        with pytest.raises(AttributeError, match=r"^bar$"):
            change()


def test_a_misspelt_name_suggests_those_that_share_most_three_grams():
    p = bag(activation="relu", activations=[], units=1)
    for attempt in (lambda: setattr(p, "actuvation", 1), lambda: p.actuvation):
        with pytest.raises(
            AttributeError, match=r"^actuvation \(did you mean: \[activation,activations\]\)$"
        ):
            attempt()


def test_sharing_exactly_half_of_the_three_grams_suggests_nothing():
    with pytest.raises(AttributeError, match=r"^abcx$"):
        _ = bag(abcy=1).abcx


def test_our_errors_are_config_errors_too():
    with pytest.raises(ConfigError):
        _ = bag(a=1).b
    assert not hasattr(bag(a=1), "b")


def test_dotted_paths_reach_into_nested_params():
    p = bag(train=bag(steps=1, inner=bag(rate=0.5)))
    assert p.get("train.inner.rate") == 0.5
    assert p.set(**{"train.steps": 2, "train.inner.rate": 0.1}) is p
    assert (p.train.steps, p.train.inner.rate) == (2, 0.1)
    assert p.delete("train.inner.rate") is p
    assert "train.inner.rate" not in p


def test_dotted_paths_go_through_list_items():
    p = bag(towers=[bag(units=1), bag(units=2)])
    assert p.get("towers[1].units") == 2
    p.set(**{"towers[0].units": 7})
    assert p.towers[0].units == 7
    assert p.get("towers[1]") is p.towers[1]
    with pytest.raises(AttributeError, match=r"^towers\[2\]$"):
        p.get("towers[2].units")


def test_a_path_through_something_else_cannot_be_introspected():
    p = bag(a=bag(b=1))
    for attempt in (lambda: p.get("a.b.c"), lambda: p.set(**{"a.b.c": 1}), lambda: p.delete("a.b.c")):
        with pytest.raises(AssertionError, match=r"^Cannot introspect <class 'int'> for a\.b$"):
            attempt()


def test_a_missing_path_is_named_in_full():
    p = bag(train=bag(steps=1))
    with pytest.raises(AttributeError, match=r"^train\.x$"):
        p.get("train.x")
    with pytest.raises(AttributeError, match=r"^test$"):
        p.get("test.x")
    with pytest.raises(AttributeError, match=r"^train\.stepz \(did you mean: \[steps\]\)$"):
        p.set(**{"train.stepz": 1})


def test_contain_in_len_dir_and_order():
    p = bag(b=1, a=bag(c=2))
    assert p.contain("b")
    assert "a.c" in p
    assert "a.d" not in p
    assert "b.x" not in p
    assert 3 not in p
    assert len(p) == 2
    assert dir(p) == ["a", "b"]
    assert [name for name, _ in p.iter_params()] == ["b", "a"]
    assert list(p) == ["b", "a"]


# Freezing


def test_frozen_params_refuse_every_change():
    p = bag(a=1, inner=bag(b=1))
    p.freeze()
    for change in (
        lambda: p.define("c", 1, ""),
        lambda: p.set(a=2),
        lambda: setattr(p, "a", 2),
        lambda: p.__setitem__("a", 2),
        lambda: p.delete("a"),
        lambda: delattr(p, "a"),
        lambda: setattr(p, "_immutable", False),
        lambda: p.set(**{"inner.b": 2}),
    ):
        with pytest.raises(TypeError, match=r"^This Params instance is immutable\.$"):
            change()
    assert p.a == 1


def test_nested_params_stay_mutable_and_copies_stay_frozen():
    p = bag(inner=bag(b=1))
    p.freeze()
    p.inner.b = 2
    assert p.inner.b == 2
    with pytest.raises(FrozenParamsError):
        p.copy().inner = 1
    p.copy().inner.b = 3


def test_a_frozen_inner_bag_is_frozen_from_outside_too():
    p = bag(inner=bag(b=1))
    p.inner.freeze()
    with pytest.raises(FrozenParamsError):
        p.set(**{"inner.b": 2})


# Copying and comparing


@pytest.mark.parametrize("copied", [Params.copy, copy.deepcopy])
def test_a_copy_shares_tensors_and_nothing_else(copied):
    weight = torch.ones(2, requires_grad=True) * 2  # a non-leaf, which deepcopy refuses
    p = bag(weight=weight, inner=bag(x=[1]), items=[bag(y=1), weight], table={"k": [weight]})
    q = copied(p)
    assert q.weight is weight
    assert q["items"][1] is weight
    assert q.table["k"][0] is weight
    q.inner.x.append(2)
    q["items"][0].y = 5
    assert p.inner.x == [1]
    assert p["items"][0].y == 1


def test_equality_is_by_names_and_values():
    assert bag(a=1, b=bag(c=[1, 2])) == bag(b=bag(c=[1, 2]), a=1)
    assert bag(a=1) != bag(a=2)
    assert bag(a=1) != bag(b=1)
    assert bag(a=1) != bag(a=1, b=1)
    assert bag(a=1) != {"a": 1}
    assert bag(a=bag(b=1)) != bag(a=bag(b=2))


def test_equality_compares_tensors_by_content():
    assert bag(w=torch.ones(3)) == bag(w=torch.ones(3))
    assert bag(w=[torch.ones(3)]) != bag(w=[torch.zeros(3)])
    assert bag(w=torch.ones(3)) != bag(w=torch.ones(2))
    assert bag(w=torch.ones(3)) != bag(w=None)


def test_params_cannot_be_hashed():
    with pytest.raises(TypeError):
        hash(bag(a=1))


# Printing


TestEnum = Enum("TestEnum", ["A", "B"])  # the name the specification prints
TestEnum.__test__ = False


class Level(IntEnum):
    LOW = 1


def test_printing_is_sorted_and_nested():
    inner = bag(bar=2)
    p = bag(foo=1, enum=TestEnum.B, inner=inner, list=[1, inner, 2], dict={"b": inner, "a": 1})
    assert str(p) == textwrap.dedent("""\
        {
          dict: {'a': 1, 'b': {'bar': 2}}
          enum: TestEnum.B
          foo: 1
          inner: {
            bar: 2
          }
          list: [1, {'bar': 2}, 2]
        }""")


def test_strings_are_quoted_and_enums_named_wherever_they_are():
    p = bag(name="tower", level=Level.LOW, levels=[Level.LOW], none=None, pair=("a", bag(z=1, y="q")))
    assert str(p).splitlines()[1:-1] == [
        "  level: Level.LOW",
        "  levels: [Level.LOW]",
        '  name: "tower"',
        "  none: None",
        "  pair: ('a', {'y': 'q', 'z': 1})",
    ]


def test_repr_is_one_line():
    assert repr(bag(b=1, a=bag(c="x"))) == "Params({'a': {'c': 'x'}, 'b': 1})"


# Between bags


def test_copy_params_to_sets_all_but_cls_and_what_is_skipped():
    source = InstantiableParams(int)
    source.define("a", 1, "")
    source.define("b", 2, "")
    source.define("inner", bag(x=1), "")
    target = InstantiableParams(str)
    for name in ("a", "b", "inner"):
        target.define(name, None, "")
    assert copy_params_to(source, target, skip=["b"]) is target
    assert (target.cls, target.a, target.b) == (str, 1, None)
    target.inner.x = 9
    assert source.inner.x == 1


def test_copy_params_to_needs_the_names_to_exist():
    with pytest.raises(UnknownParamError):
        copy_params_to(bag(a=1), bag(b=1))


def test_update_params_sets_leaves_at_any_depth_and_pops_them():
    p = bag(a=1, inner=bag(b=2, deeper=bag(c=3)))
    args = {"a": 10, "c": 30, "inner": "not a leaf", "unknown": 1}
    update_params(p, args)
    assert (p.a, p.inner.b, p.inner.deeper.c) == (10, 2, 30)
    assert args == {"inner": "not a leaf", "unknown": 1}


# Instantiating


class Layer:
    def __init__(self, params):
        self.p = params

    @classmethod
    def params(cls):
        p = InstantiableParams(cls)
        p.define("units", 4, "")
        return p


def test_a_constructor_of_params_gets_the_params():
    p = Layer.params()
    p.units = 8
    built = p.instantiate()
    assert type(built) is Layer
    assert built.p is p


class Plain:
    def __init__(self, units, rate=0.1, *rest, **kwargs):
        self.got = {"units": units, "rate": rate, "rest": rest, **kwargs}


def test_other_constructors_get_matching_leaves_nested_ones_too():
    p = InstantiableParams(Plain)
    p.define("units", 4, "")
    p.define("other", "unused", "")
    p.define("inner", bag(rate=0.5), "")
    assert p.instantiate().got == {"units": 4, "rate": 0.5, "rest": ()}


def test_a_nearer_leaf_wins_over_a_deeper_one():
    p = InstantiableParams(Plain)
    p.define("inner", bag(units=1), "")
    p.define("units", 2, "")
    assert p.instantiate().got["units"] == 2


def test_allowed_kwargs_are_passed_when_not_none():
    p = params(Plain)
    p.units = 3
    p.allowed_kwargs = {"input_dim": 5, "weights": None}
    assert p.instantiate().got == {
        "units": 3,
        "rate": 0.1,
        "rest": (),
        "name": "Plain",
        "input_dim": 5,
    }


def test_an_extra_keyword_that_is_not_allowed_is_refused():
    p = params(Plain)
    p.allowed_kwargs = {"colour": "red"}
    with pytest.raises(InvalidParamError, match="cannot pass 'colour' to Plain"):
        p.instantiate()


def test_a_keyword_the_constructor_does_not_take_is_refused():
    p = params(Narrow)
    p.allowed_kwargs = {"weights": 1}
    with pytest.raises(InvalidParamError, match="cannot pass 'weights' to Narrow"):
        p.instantiate()


def test_without_a_class_there_is_nothing_to_build():
    with pytest.raises(AssertionError, match="`cls` is not set"):
        InstantiableParams().instantiate()


def test_a_copy_keeps_its_class():
    assert InstantiableParams(Plain).copy().cls is Plain


def test_the_allowed_names_are_the_eight_of_the_specification():
    assert allowed_kwargs == {
        "input_dim",
        "input_shape",
        "batch_input_shape",
        "weights",
        "activity_regularizer",
        "autocast",
        "implementation",
        "name",
    }


# Parameters from constructors


class Narrow:
    def __init__(self, units=2):
        self.units = units


class Base:
    def __init__(self, units, rate=0.1, *rest, **more):
        self.got = (units, rate, rest, more)


class Derived(Base):
    def __init__(self, depth=2, rate=0.2, **kwargs):
        super().__init__(rate=rate, **kwargs)
        self.depth = depth


def test_params_are_the_arguments_of_the_class_and_its_bases():
    p = params(Derived)
    assert p.cls is Derived
    assert p.name == "Derived"
    assert p.units is None
    assert (p.depth, p.rate) == (2, 0.2)
    assert p.allowed_kwargs is None
    assert sorted(p) == ["allowed_kwargs", "cls", "depth", "name", "rate", "units"]


def test_with_params_gives_a_fresh_bag_each_time():
    decorated = with_params(type("Tower", (Narrow,), {}))
    first, second = decorated.params(), decorated.params()
    first.units = 9
    assert second.units == 2
    assert decorated.params().instantiate().units == 2


def test_a_base_with_params_is_where_a_subclass_starts():
    class Head(Layer):
        def __init__(self, units=16, bias=True):
            self.units, self.bias = units, bias

    p = params(Head)
    assert (p.cls, p.units, p.bias, p.name) == (Head, 16, True, "Head")
    assert p.instantiate().units == 16


def test_an_argument_updates_the_nested_parameter_that_has_its_name():
    class Nested:
        @classmethod
        def params(cls):
            p = InstantiableParams(cls)
            p.define("optimizer", bag(rate=0.1), "")
            return p

    class Child(Nested):
        def __init__(self, rate=0.7):
            self.rate = rate

    p = params(Child)
    assert p.optimizer.rate == 0.7
    assert "rate" not in p
    assert p.instantiate().rate == 0.7


def test_a_subclass_of_a_decorated_class_describes_itself():
    @with_params
    class Parent:
        def __init__(self, units=1):
            self.units = units

    class Child(Parent):
        def __init__(self, depth=3, **kwargs):
            super().__init__(**kwargs)
            self.depth = depth

    p = Child.params()
    assert (p.cls, p.name, p.units, p.depth) == (Child, "Child", 1, 3)


def test_a_constructor_may_name_its_instances():
    class Named:
        def __init__(self, name="tower"):
            self.name = name

    class Unnamed:
        def __init__(self, name=None):
            self.name = name

    assert params(Named).name == "tower"
    assert params(Unnamed).instantiate().name == "Unnamed"


def test_unique_names_are_really_unique():
    names = UniqueNames()
    assert [params(Narrow, names).name for _ in range(3)] == ["Narrow", "Narrow_1", "Narrow_2"]


def test_a_class_without_a_constructor_has_no_arguments():
    class Empty:
        pass

    assert isinstance(params(Empty).instantiate(), Empty)


def test_a_default_that_is_itself_params_is_passed_whole():
    class Model:
        def __init__(self, tower=None):
            self.tower = tower

    p = params(Model)
    p.tower = bag(units=3)
    assert p.instantiate().tower.units == 3
