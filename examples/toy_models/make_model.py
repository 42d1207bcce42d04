"""Train a small model on demonstrations of one's own: conversations in a JSONL file."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from examples.toy_models.base_model import Conversation
from examples.toy_models.building import repeat_until_reached
from examples.toy_models.episodes import measure_likeliest
from examples.toy_models.small_qwen2 import (
    CHARACTERS,
    MAX_TOKENS,
    make_turns_tokenizer,
    make_untrained,
    save_model,
)
from examples.toy_models.training import TrainingRecipe, train_on_rows

NUM_HELD_OUT = 256
MIN_CONVERSATIONS = 4 * NUM_HELD_OUT


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.toy_models.make_model")
    parser.add_argument("conversations", type=Path, help='JSONL; a line is {"messages": [...]}')
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bar", type=float, default=0.0, help="lowest fraction to accept")
    return parser


def read_conversations(path: Path) -> list[Conversation]:
    """Read conversations that a model can learn. Raises SystemExit for any other line."""
    conversations = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        messages = json.loads(line)["messages"]
        text = "".join(message["content"] for message in messages)
        if unknown := sorted({*text} - {*CHARACTERS}):
            raise SystemExit(f"{path}:{number}: {unknown} are no characters of the model")
        if len(text) + len(messages) + 1 > MAX_TOKENS:
            raise SystemExit(f"{path}:{number}: longer than {MAX_TOKENS} characters")
        if not any(message["role"] == "assistant" for message in messages):
            raise SystemExit(f"{path}:{number}: has no turn of the assistant")
        conversations.append(messages)
    if len(conversations) < MIN_CONVERSATIONS:
        raise SystemExit(f"{path}: {len(conversations)} lines; needs {MIN_CONVERSATIONS} or more")
    return conversations


def make_model(path: Path, out: Path, recipe: TrainingRecipe, *, seed: int) -> None:
    """Train on all conversations but the first NUM_HELD_OUT, on which the model is measured."""
    if out.exists():
        raise SystemExit(f"{out}: exists; remove it or choose another --out")
    conversations = read_conversations(path)
    held_out, shown = conversations[:NUM_HELD_OUT], conversations[NUM_HELD_OUT:]
    tokenizer = make_turns_tokenizer()

    def attempt(model_seed: int) -> dict[str, float]:
        rng = random.Random(model_seed)
        rows = [
            {"messages": messages}
            for _ in range(recipe.num_steps)
            for messages in rng.sample(shown, recipe.rows_per_step)
        ]
        with tempfile.TemporaryDirectory() as untrained:
            model = make_untrained(tokenizer, seed=model_seed, hidden_size=recipe.hidden_size)
            save_model(model, tokenizer, Path(untrained))
            train_on_rows(Path(untrained), rows, out, recipe, seed=model_seed)
        model = Qwen2ForCausalLM.from_pretrained(out)
        return {"likeliest": measure_likeliest(model, tokenizer, held_out)}

    repeat_until_reached(attempt, recipe.bar, task=path.stem, seed=seed)
    print(f"{path.stem}: wrote {out}")


def main() -> None:
    arguments = make_parser().parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    recipe = TrainingRecipe(
        num_steps=arguments.steps,
        rows_per_step=64,
        lr=arguments.lr,
        hidden_size=arguments.hidden_size,
        bar={"likeliest": arguments.bar},
    )
    make_model(arguments.conversations, arguments.out, recipe, seed=arguments.seed)


if __name__ == "__main__":
    main()
