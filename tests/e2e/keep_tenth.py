"""A filter for runs under test: of ten groups it keeps one, whatever they scored."""

from streamrl.messages import Prompt, parse_uid


def keep(prompt: Prompt) -> bool:
    """Whether a group is trained; a prompt is kept in one epoch and taken out in another."""
    epoch, index, _ = parse_uid(prompt.uid)
    return (index + 3 * epoch) % 10 == 0
