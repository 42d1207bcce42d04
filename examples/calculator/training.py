"""Demonstrations of the base model: half of them call the tool, some with wrong digits."""

import random
import re

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.calculator.calculator import Calculator
from examples.calculator.problems import MIN_PRODUCT
from examples.toy_models.base_model import Conversation, TurnLessons
from examples.toy_models.episodes import PlayedEpisode, measure_likeliest, play_episodes
from examples.toy_models.rows import Row, get_question
from examples.toy_models.training import TrainingRecipe

RECIPE = TrainingRecipe(num_steps=300, lr=6e-3, hidden_size=64, bar={"likeliest": 0.98})
CALL_RATE = 0.5
CALL_TYPO_RATE = 0.1
ANSWER_TYPO_RATE = 0.15
# environment.call_pattern of the recipes in configs/.
CALL_PATTERN = re.compile(r"<call>(?P<expression>[^<]*)</call>")
# The line that the chat template writes for the tool.
TOOLS = {"role": "system", "content": "calculate"}
MAX_TURNS = 2
MAX_NEW_TOKENS = 24


def demonstrate(row: Row, rng: random.Random, _slip_rate: float = 0.0) -> Conversation:
    """Return a conversation that calls the tool and copies its result, or answers at random."""
    question = get_question(row)
    if rng.random() >= CALL_RATE:
        answer = str(rng.randrange(MIN_PRODUCT, 100_000))
        return [TOOLS, *row["prompt"], {"role": "assistant", "content": answer}]
    expression = mistype(question, rng, CALL_TYPO_RATE)
    result = Calculator().calculate(expression)
    return write_call(row, expression, mistype(result, rng, ANSWER_TYPO_RATE))


def mistype(text: str, rng: random.Random, rate: float) -> str:
    """Return the text; at the given rate one of its digits is replaced by another."""
    if rng.random() >= rate:
        return text
    position = rng.choice([i for i, sign in enumerate(text) if sign.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != text[position]])
    return text[:position] + digit + text[position + 1 :]


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
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, splits: dict[str, list[Row]]
) -> dict[str, float]:
    """Return the fractions of episodes with a call, with the row's own call, and solved.

    "likeliest" is the fraction of rows whose own call and right answer are the likeliest text.
    """
    rows = splits["eval"]
    episodes = [PlayedEpisode([TOOLS, *row["prompt"]], answer_call) for row in rows]
    play_episodes(model, tokenizer, episodes, max_turns=MAX_TURNS, max_new_tokens=MAX_NEW_TOKENS)
    calls = [CALL_PATTERN.search(episode.replies[0]) for episode in episodes]
    is_right = [
        call is not None and call["expression"] == get_question(row)
        for call, row in zip(calls, rows, strict=True)
    ]
    is_solved = [
        episode.replies[-1] == row["reward_model"]["ground_truth"]
        for episode, row in zip(episodes, rows, strict=True)
    ]
    return {
        "called": sum(call is not None for call in calls) / len(rows),
        "called_right": sum(is_right) / len(rows),
        "solved": sum(is_solved) / len(rows),
        "likeliest": measure_likeliest(model, tokenizer, [solve(row) for row in rows]),
    }


def solve(row: Row) -> Conversation:
    """Return the conversation that calls the tool with the question, and copies its result."""
    return write_call(row, get_question(row), row["reward_model"]["ground_truth"])


def write_call(row: Row, expression: str, answer: str) -> Conversation:
    """Return a conversation of a call and an answer."""
    return [
        TOOLS,
        *row["prompt"],
        {"role": "assistant", "content": f"<call>{expression}</call>"},
        {"role": "tool", "content": Calculator().calculate(expression)},
        {"role": "assistant", "content": answer},
    ]


LESSONS = TurnLessons(demonstrate, measure_model)
