"""Play episodes of many turns with a small model, to measure it before training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.base_model import sample_completions
from examples.toy_models.demonstrations import Conversation


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
