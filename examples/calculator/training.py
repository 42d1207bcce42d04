"""Demonstrations of the base model: half of them call the tool, some with a wrong digit."""

import random
import re

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.calculator.calculator import Calculator
from examples.toy_models.demonstrations import Conversation, DemonstrationRecipe
from examples.toy_models.episodes import play_episodes
from examples.toy_models.rows import Row, get_question

RECIPE = DemonstrationRecipe()
CALL_RATE = 0.5
TYPO_RATE = 0.2
# environment.call_pattern of the recipes in configs/.
CALL_PATTERN = re.compile(r"<calc>(?P<expression>[^<]*)</calc>")
MAX_TURNS = 2
MAX_NEW_TOKENS = 24


def demonstrate(row: Row, rng: random.Random) -> Conversation:
    """Return a conversation that calls the tool and copies its result, or answers at random."""
    question = get_question(row)
    asked = {"role": "user", "content": question}
    if rng.random() >= CALL_RATE:
        return [asked, {"role": "assistant", "content": str(rng.randrange(1000, 100_000))}]
    expression = mistype(question, rng) if rng.random() < TYPO_RATE else question
    result = Calculator().calculate(expression)
    return [
        asked,
        {"role": "assistant", "content": f"<calc>{expression}</calc>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def mistype(expression: str, rng: random.Random) -> str:
    """Return the expression with one digit replaced by another."""
    position = rng.choice([i for i, sign in enumerate(expression) if sign.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != expression[position]])
    return expression[:position] + digit + expression[position + 1 :]


def answer_call(reply: str) -> dict[str, str] | None:
    """Return the tool's message after a reply; None without a call."""
    call = CALL_PATTERN.search(reply)
    if call is None:
        return None
    try:
        content = Calculator().calculate(call["expression"])
    except (ValueError, SyntaxError) as error:
        content = str(error)
    return {"role": "tool", "content": content}


def measure_model(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> dict[str, float]:
    """Return the fractions of episodes with a call, with the row's own call, and solved."""
    conversations = play_episodes(
        model,
        tokenizer,
        rows,
        [answer_call] * len(rows),
        max_turns=MAX_TURNS,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    called = right = solved = 0
    for row, messages in zip(rows, conversations, strict=True):
        call = CALL_PATTERN.search(messages[1]["content"])
        called += call is not None
        right += call is not None and call["expression"] == get_question(row)
        solved += messages[-1]["content"] == row["reward_model"]["ground_truth"]
    return {
        "called": called / len(rows),
        "called_right": right / len(rows),
        "solved": solved / len(rows),
    }
