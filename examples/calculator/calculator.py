"""Answer a product with the help of a tool, a calculator."""

import ast
import operator
import re

from streamrl.environments.interface import EpisodeSummary
from streamrl.messages import Prompt

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
# Rejects names, calls and powers, and texts long enough for deep nesting or huge numbers.
EXPRESSION = re.compile(r"[0-9+\-*() ]{1,40}")


class Calculator:
    """Conversation in which the policy may call `calculate` before it answers."""

    def reset(self, row: Prompt) -> None:
        self.product = row.ground_truth
        self.shown = ""

    def calculate(self, expression: str) -> str:
        """Work out an expression such as 12*(3+4)."""
        if not EXPRESSION.fullmatch(expression):
            raise ValueError("only whole numbers, + - * and parentheses are allowed")
        self.shown = str(evaluate(ast.parse(expression.strip(), mode="eval").body))
        return self.shown

    def state_key(self) -> str:
        """Return the last result: turns of a question that follow the same one are comparable."""
        return self.shown

    def score(self, episode: EpisodeSummary) -> float:
        """Return 1 if the last turn is the product and nothing else, else 0."""
        return float(episode.answer == self.product)


def evaluate(node: ast.expr) -> int:
    """Return the value of a parsed expression. Raises ValueError for anything but integers."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return int(OPERATORS[type(op)](evaluate(left), evaluate(right)))
        case _:
            raise ValueError(f"not allowed: {ast.unparse(node)}")
