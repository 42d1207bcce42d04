"""Docstrings as the site shows them."""

from docs.docstrings import SHORTER, rewrite_docstring, rewrite_signature


def function(size, first, last, data): ...


def rewrite(docstring: str) -> list[str]:
    """Return the lines that replace those of a docstring of `function`."""
    lines = docstring.splitlines()
    rewrite_docstring(None, "function", "function", function, None, lines)
    return lines


def test_long_names_in_signatures_are_short():
    array, columns, _ = SHORTER
    event = None, "function", "function", function, None, f"({array}, <factory>)", columns
    assert rewrite_signature(*event) == ("(Array, ...)", "Columns")


def test_lines_and_sentences_that_name_a_parameter_become_a_field_list():
    assert rewrite("Cut data.\n\nsize: number of rows,\n    at least 1. first, last: ends.") == [
        "Cut data.",
        "",
        ":param size: number of rows, at least 1.",
        ":param first: ends.",
        ":param last: ends.",
        "",
    ]
    assert rewrite("- size: of `data`. Raises ValueError for 0.") == [
        ":param size: of ``data``\\ .",
        "",
        "Raises ValueError for 0.",
        "",
    ]
    assert rewrite("other: no parameter") == ["other: no parameter", ""]


def test_code_is_literal_and_links_to_classes():
    assert rewrite("Return `a | b`, a `Turn`, or OK*.") == [
        "Return ``a | b``\\ , a :py:obj:`.Turn`\\ , or OK\\*.",
        "",
    ]
    assert rewrite("Example:\n\n    size = 2") == ["Example:", "", "::", "", "    size = 2", ""]
