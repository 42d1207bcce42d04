"""Parse the tests of a program from the ground truth of a code dataset.

A ground truth is a dict, or its JSON, in one of three forms:
    {"inputs": [...], "outputs": [...]}: stdin and expected stdout of each test.
    The same with "fn_name": arguments and expected value of a function call. An input is a list of
        arguments, or text with an argument in JSON on each line; an output is a value or its JSON.
    {"assert_case": [...]}: asserts such as `assert f(1, "a") == [2]` with literals only.
"""

import ast
import json
from collections.abc import Sequence
from typing import Any

from streamrl.errors import RewardError
from streamrl.files.bounded_read import parse_json
from streamrl.rewards.sandbox.program import CallTest, StdinTest

ProgramTest = StdinTest | CallTest


def read_tests(truth: Any, *, most: int = 0) -> list[ProgramTest]:
    """Return the first `most` tests in a ground truth; 0: all. Raises RewardError."""
    try:
        fields = _parse_object(truth)
        tests = (
            _parse_assertions(fields["assert_case"])
            if "assert_case" in fields
            else _parse_pairs(fields)
        )
    except (RecursionError, MemoryError, OverflowError) as error:
        raise RewardError(f"ground_truth cannot be read: {type(error).__name__}") from None
    if not tests:
        raise RewardError("ground_truth contains no tests")
    return tests[: most or None]


def _parse_assertions(cases: Any) -> list[ProgramTest]:
    if isinstance(cases, str):
        cases = [cases]
    if not isinstance(cases, Sequence):
        raise RewardError(f"assert_case must be a list of asserts, is {type(cases).__name__}")
    return [_parse_assertion(case) for case in cases]


def _parse_object(truth: Any) -> dict[str, Any]:
    if isinstance(truth, str):
        try:
            truth = parse_json(truth)
        except ValueError as error:
            raise RewardError(
                f"ground_truth must be JSON with inputs and outputs: {error}"
            ) from None
    if not isinstance(truth, dict):
        raise RewardError(
            f"ground_truth must be an object with inputs and outputs, is {type(truth).__name__}"
        )
    return truth


def _parse_pairs(fields: dict[str, Any]) -> list[ProgramTest]:
    """Parse `inputs` and `outputs`: tests on stdin, or function calls if fn_name is given."""
    inputs, outputs = fields.get("inputs"), fields.get("outputs")
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise RewardError(f"ground_truth.{name} must be a list, is {type(values).__name__}")
    assert inputs is not None and outputs is not None
    if len(inputs) != len(outputs):
        raise RewardError(
            f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; the numbers must"
            " be equal"
        )
    function = fields.get("fn_name")
    if not function:
        return [
            StdinTest(_join_lines(i), _join_lines(o)) for i, o in zip(inputs, outputs, strict=True)
        ]
    return [
        CallTest(function, _parse_call_arguments(i), _parse_accepted(o))
        for i, o in zip(inputs, outputs, strict=True)
    ]


def _join_lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(line) for line in value)
    return str(value)


def _parse_call_arguments(value: Any) -> list[Any]:
    """Parse a list, text with one JSON value per line, or any other value as only argument."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, list) else [value]
    try:
        return [parse_json(line) for line in value.split("\n") if line.strip()]
    except ValueError as error:
        raise RewardError(f"an input of fn_name must be JSON on each line: {error}") from None


def _parse_accepted(value: Any) -> list[Any]:
    """Parse an expected return value; return all values that a function may return.

    Some datasets wrap the expected value in a list of length one; its element is accepted too.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return [value]
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def _parse_assertion(case: Any) -> CallTest:
    """Parse `assert f(literals) == literal` to a call and its expected value.

    Other asserts raise RewardError: they would have to run inside the program.
    """
    try:
        (statement,) = ast.parse(str(case).strip()).body
        assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
        call, (value,) = statement.test.left, statement.test.comparators
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords
        assert isinstance(statement.test.ops[0], ast.Eq)
        arguments = [ast.literal_eval(argument) for argument in call.args]
        return CallTest(
            call.func.id, _to_json_types(arguments), [_to_json_types(ast.literal_eval(value))]
        )
    except (SyntaxError, ValueError, TypeError, AssertionError):
        text = " ".join(str(case).split())[:80]
        raise RewardError(
            f"assert_case must be `assert f(literals) == literal`, is {text!r}"
        ) from None


def _to_json_types(value: Any) -> Any:
    """Convert Python literals as JSON does: tuples to lists, dict keys to text."""
    return json.loads(json.dumps(value))
