"""Measure a small model on conversations of many turns: play episodes, compare with given ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.base_model import Conversation, sample_completions
from streamrl.data.chat_template import load_chat_template
from streamrl.data.rows import DataRow, RowKeys, parse_record
from streamrl.environments.rendering.target_renderer import TargetRenderer
from streamrl.messages import TARGETS


@dataclass
class PlayedEpisode:
    """Episode in play.

    messages: what was said so far; playing appends to it. observe: function of a reply that returns
    the message after it, or None if the episode ends.
    """

    messages: Conversation
    observe: Callable[[str], dict[str, str] | None]

    @property
    def replies(self) -> list[str]:
        """Texts of the model's turns."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]


def play_episodes(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    episodes: Sequence[PlayedEpisode],
    *,
    max_turns: int,
    max_new_tokens: int,
) -> None:
    """Play episodes to their ends at temperature 1. max_new_tokens: limit of a turn."""
    playing = list(episodes)
    for turn in range(max_turns):
        if not playing:
            return
        rows = [{"prompt": episode.messages} for episode in playing]
        replies = sample_completions(
            model, tokenizer, rows, max_new_tokens=max_new_tokens, num_samples=1, seed=turn
        )
        going_on = []
        for episode, (reply,) in zip(playing, replies, strict=True):
            episode.messages.append({"role": "assistant", "content": reply})
            observation = episode.observe(reply)
            if observation is not None:
                episode.messages.append(observation)
                going_on.append(episode)
        playing = going_on


def encode_conversation(
    messages: Conversation, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation that `sft` trains, and which of them it learns."""
    row = parse_record({"messages": messages}, "conversation", 0, RowKeys("prompt", "", TARGETS))
    assert isinstance(row, DataRow), row
    renderer = TargetRenderer(tokenizer, load_chat_template("model", tokenizer), TARGETS)
    prompt, ((completion, mask),) = renderer.render_row(row)
    ids = [*prompt, *np.frombuffer(completion, np.int32).tolist()]
    return ids, [False] * len(prompt) + np.frombuffer(mask, np.bool_).tolist()


def measure_likeliest(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> float:
    """Return the fraction of conversations whose written tokens are the model's likeliest ones.

    Reinforcement learning soon makes likely answers certain, so a task is solved in about this
    fraction after it. Few right samples are no obstacle, a preferred wrong token is.
    """
    num_reproduced = 0
    for messages in conversations:
        ids, is_written = (torch.tensor(x) for x in encode_conversation(messages, tokenizer))
        with torch.inference_mode():
            likeliest = model.eval()(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)
        num_reproduced += bool((likeliest[:-1] == ids[1:])[is_written[1:]].all())
    return num_reproduced / len(conversations)
