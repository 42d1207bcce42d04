"""Checks of an environment's texts with a model's tokenizer and chat template."""

from collections.abc import Iterator, Sequence

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import render_start
from streamrl.environments.episodes.start_driver import choose_call_format
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.probing.environment_probe import RANDOM
from streamrl.environments.probing.episode_record import EpisodeRecord
from streamrl.environments.probing.finding import (
    Finding,
    report_failure,
    report_ok,
    report_warning,
)
from streamrl.environments.rendering.conformance import (
    TOOL_CALL,
    check_template,
    describe_treatment,
)
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.errors import ConfigError
from streamrl.messages import describe_prompt

LARGE_SHARE = 0.5
"""Share of environment.max_tokens from which observations leave the policy little room."""


def probe_template(
    config: EnvironmentConfig, description: EnvironmentDescription, renderer: TurnRenderer
) -> Iterator[Finding]:
    """Yield what the chat template does with turns, and the format of the policy's calls.

    Raises ConfigError for a template in which a user's messages cannot follow turns.
    """
    report = check_template(renderer)
    num_identical = sum(not (r.difference or r.unsupported) for r in report.results)
    yield report_ok(
        "template",
        f"{report.template}: {num_identical} of {len(report.results)} kinds of conversation are"
        " identical to a whole rendering",
    )
    for kind, difference in report.differences.items():
        treatment = describe_treatment(config.max_samples)
        yield report_ok("template", f"{kind}: differs at {difference}. {treatment}")
    unsupported = {r.kind: r.unsupported for r in report.results if r.unsupported}
    for kind, reason in unsupported.items():
        text = f"{kind}: not supported: {reason}"
        if kind == TOOL_CALL and description.tools:
            text += "; choose a template with tools, or write step(reply) and answer as user"
            yield report_failure("template", text)
        else:
            yield report_ok("template", text)
    if description.tools:
        try:
            # Parsing checks that the format can name each of the tools.
            choose_call_format(config, renderer, description.tools).parse([], description.tools)
            yield report_ok("call format", config.call_format)
        except ConfigError as error:
            yield report_failure("call format", str(error))


def probe_tokens(
    records: Sequence[EpisodeRecord], config: EnvironmentConfig, renderer: TurnRenderer
) -> Iterator[Finding]:
    """Compare the tokens of tools and observations with environment.max_tokens."""
    subject, limit = "tokens", config.max_tokens
    longest: tuple[int, int, EpisodeRecord] | None = None
    for record in records:
        try:
            start, answers = count_observed_tokens(record, renderer)
        except ConfigError as error:
            yield report_failure(subject, f"{describe_prompt(record.prompt)}: {error}")
            return
        if longest is None or start + answers > longest[0] + longest[1]:
            longest = start, answers, record
    if longest is None:
        return
    start, answers, record = longest
    text = (
        f"longest episode, {describe_prompt(record.prompt)}, {record.policy} policy: tools and"
        f" first observation {start} tokens, answers to {len(record.steps)} turns {answers};"
        f" environment.max_tokens={limit}"
    )
    if start >= limit:
        yield report_failure(subject, f"{text}: no room for a turn: raise it")
    elif start + answers > LARGE_SHARE * limit and record.policy == RANDOM:
        yield report_ok(subject, f"{text}, of which random text and calls may take too many")
    elif start + answers > LARGE_SHARE * limit:
        yield report_warning(
            subject, f"{text} leaves the policy {max(0, limit - start - answers)}: raise it"
        )
    else:
        yield report_ok(subject, text)


def count_observed_tokens(record: EpisodeRecord, renderer: TurnRenderer) -> tuple[int, int]:
    """Return the tokens of tools and first observation, and those of all later observations."""
    row, start = record.prompt.messages, record.start
    _, with_start = render_start(renderer, record.prompt, start)
    answers = sum(
        len(
            renderer.render_bridge(
                [], step.messages, is_cut=True, has_tools=bool(start.tools)
            ).token_ids
        )
        for step in record.steps
        if step.messages
    )
    return len(with_start) - len(renderer.render_prompt(row)), answers
