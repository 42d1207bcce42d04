"""Check that the example tasks of many turns share: what they teach is what an episode renders."""

from collections.abc import Iterable, Sequence

from examples.toy_models.base_model import Conversation
from examples.toy_models.episodes import encode_conversation
from examples.toy_models.small_qwen2 import make_turns_tokenizer
from streamrl.data.chat_template import load_chat_template
from streamrl.environments.interface import ToolSchema
from streamrl.environments.rendering.turn_renderer import TurnRenderer


def make_renderer() -> TurnRenderer:
    """Return the renderer of the tasks' base models."""
    tokenizer = make_turns_tokenizer()
    return TurnRenderer(tokenizer, load_chat_template("model", tokenizer))


def check_demonstrations(
    demonstrations: Iterable[Conversation], *, num_prompt: int, tools: Sequence[ToolSchema] = ()
) -> None:
    """Assert that training sees the tokens of an episode, and learns what the policy samples.

    num_prompt: messages before the first turn that the tools' schemas do not stand for.
    """
    renderer = make_renderer()
    tokenizer = renderer.tokenizer
    for messages in demonstrations:
        opening, turns = messages[: num_prompt + len(tools)], messages[num_prompt + len(tools) :]
        stream = renderer.render_prompt(opening[len(tools) :], tools).tolist()
        is_learned = [False] * len(stream)
        for message, following in zip(turns, [*turns[1:], None], strict=True):
            if message["role"] != "assistant":
                continue
            sampled = [*tokenizer(message["content"]).input_ids, tokenizer.eos_token_id]
            stream += sampled
            is_learned += [True] * len(sampled)
            if following is not None:
                bridge = renderer.render_bridge(sampled, [following], is_cut=False).token_ids
                stream += bridge.tolist()
                is_learned += [False] * len(bridge)
        assert encode_conversation(messages, tokenizer) == (stream, is_learned)
