"""Environment classes of users: the two shapes, and classes that fit neither."""

import pytest

from streamrl.environments.config import EnvironmentSpec
from streamrl.environments.hosts.environment_host import load_user_class
from streamrl.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(source):
        path = tmp_path / "mine.py"
        path.write_text(source)
        return str(path)

    return write_file


def load(path, **settings):
    return load_user_class(EnvironmentSpec(path=path, **settings))


def test_tools_keep_their_order_and_may_be_inherited_static_or_of_the_class(write):
    source = '''
class Shared:
    @staticmethod
    def zebra(a: int) -> int:
        """Z"""
    def _helper(self): pass

class Mine(Shared):
    limit = 3
    class Inner: pass
    @property
    def size(self): return 1
    @classmethod
    async def lion(cls, a: int) -> int:
        """L"""
    def ape(self, a: int) -> int:
        """A"""
'''
    loaded = load(write(source) + ":Mine")
    tools = [tool["function"]["name"] for tool in loaded.description.tools]
    assert tools == ["zebra", "lion", "ape"]
    assert loaded.methods["lion"].is_async and not loaded.methods["ape"].is_async


TOOL = 'def calculate(self, a: str):\n        """C"""'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class A:\n    def reset(self): pass", "{label}: in {path} has no public method; write"),
        (
            f"class A:\n    def step(self, reply): pass\n    {TOOL}",
            "{label}: in {path} has step and also calculate; write either step(self, reply)",
        ),
        (
            "class A:\n    def step(self): pass",
            "{label}.step: in {path} has parameters () after self; write it as step(self, reply)",
        ),
        (
            "class A:\n    def step(self, reply): pass\n    def reset(self, prompt): pass",
            "{label}.reset: in {path} requires prompt; available, by keyword: row, seed",
        ),
        ("def f(): pass", "environment.path={path}: must define one class, or be written as"),
    ],
)
def test_a_class_of_no_shape_is_refused_in_one_line(write, source, words):
    path = write(source)
    with pytest.raises(ConfigError) as caught:
        load(path)
    expected = words.format(path=path, label=f"environment.path={path}:A")
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_a_reference_that_names_no_class_is_refused(write):
    path = write("x = 1\nclass A:\n    def step(self, reply): pass")
    for reference, words in ((":B", "no such class; its classes are A"), ("x", "write it as file")):
        with pytest.raises(ConfigError, match=words):
            load(path + reference)


WITH_OPTIONS = """
class Mine:
    def __init__(self, size, *, words=()): pass
    def step(self, reply): pass
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "size: missing: the parameters of Mine in {path} are size, words"),
        ({"size": 4, "word": "a"}, "word: no such parameter: the parameters of Mine in {path} are"),
    ],
)
@pytest.mark.parametrize("section", ["environment", "environment.named.guess"])
def test_an_option_that_does_not_suit_the_constructor_is_named(write, section, options, words):
    path = write(WITH_OPTIONS)
    with pytest.raises(ConfigError) as caught:
        load_user_class(EnvironmentSpec(path=path, options=options), section=section)
    assert str(caught.value).startswith(f"{section}.options.{words.format(path=path)}")
