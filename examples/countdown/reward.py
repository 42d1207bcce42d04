"""Countdown's reward: 1 if the answer reaches the target and uses each number at most once."""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

SIGNS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Reject names, calls, and texts long enough for deep nesting or huge numbers.
SUM = re.compile(r"[0-9+\-*/() ]{1,60}")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score a completion; ground_truth: {"numbers": [2, 7, 9], "target": 25}. verl's signature."""
    try:
        value, numbers = evaluate_sum(solution_str)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    in_hand = not Counter(numbers) - Counter(ground_truth["numbers"])
    return float(in_hand and value == ground_truth["target"])


def evaluate_sum(text):
    """Return the exact value of a sum such as `7+2*9`, and its numbers in order.

    Raises SyntaxError, ValueError or ZeroDivisionError if the text is not a sum.
    """
    if not SUM.fullmatch(text):
        raise ValueError(f"not a sum: {text[:60]!r}")
    numbers = []

    def evaluate_node(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            left, right = evaluate_node(node.left), evaluate_node(node.right)
            return SIGNS[type(node.op)](left, right)
        raise ValueError(f"not part of a sum: {ast.unparse(node)}")

    return evaluate_node(ast.parse(text.strip(), mode="eval").body), numbers
