"""Ids of tool calls. Apart from the parsers, which the processes of environments do not import."""


def make_call_id(number: int) -> str:
    """Return the id of call `number` of a reply, which the tool message answers.

    Nine letters and digits: Mistral's templates refuse other ids.
    """
    return f"call{number:05}"
