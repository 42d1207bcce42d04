"""Play episodes of many turns with a small model, to measure it before training."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.base_model import sample_completions
from examples.toy_models.demonstrations import Conversation
from examples.toy_models.rows import Row

Observe = Callable[[str], dict[str, str] | None]
"""Function of a reply that returns the message after it; None if the episode ends."""


def play_episodes(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    observers: Sequence[Observe],
    *,
    max_turns: int,
    max_new_tokens: int,
    seed: int = 0,
) -> list[Conversation]:
    """Play an episode per row at temperature 1; return the conversations.

    observers: environment of each row. max_new_tokens: limit of a turn.
    """
    conversations = [list(row["prompt"]) for row in rows]
    playing = list(zip(conversations, observers, strict=True))
    for turn in range(max_turns):
        if not playing:
            break
        replies = sample_completions(
            model,
            tokenizer,
            [{"prompt": messages} for messages, _ in playing],
            max_new_tokens=max_new_tokens,
            num_samples=1,
            seed=seed + turn,
        )
        going_on = []
        for (messages, observe), (reply,) in zip(playing, replies, strict=True):
            messages.append({"role": "assistant", "content": reply})
            observation = observe(reply)
            if observation is not None:
                messages.append(observation)
                going_on.append((messages, observe))
        playing = going_on
    return conversations
