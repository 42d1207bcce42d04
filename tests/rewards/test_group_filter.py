import textwrap

import numpy as np
import pytest

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Prompt
from streamrl.rewards.group_filter import FilterConfig, build_group_filter

PROMPT = Prompt("3:7:0", np.array([1], np.int32), data_source="sums", ground_truth="5")
EQUAL = FilterConfig("equal_rewards")


def reason(config, scores, **components):
    """Return the filter's reason for a group with these scores and named rewards."""
    columns = {
        f"reward/{name}": np.array(column, np.float32) for name, column in components.items()
    }
    columns["scores"] = np.array(scores, np.float32)
    columns["lengths"] = np.full(len(scores), 9, np.int32)
    return build_group_filter(config)(PROMPT, columns)


@pytest.fixture
def filter_from(tmp_path):
    """Create filter configs from the source of a file with function `name`."""

    def make(source, name="keep"):
        path = tmp_path / "filter.py"
        path.write_text(textwrap.dedent(source))
        return FilterConfig("function", path=str(path), function=name)

    return make


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([1] * 8, "all 8 rewards are 1"),
        ([-0.0, 0.0], "all 2 rewards are 0"),
        ([1, 1, 1, 0], None),
        ([np.full(10, 0.1, np.float32).cumsum()[-1], 1], "all 2 rewards are 1"),
        ([1, 1.00001], None),
        ([1], None),
    ],
)
def test_equal_rewards_rejects_groups_of_two_or_more_rollouts(scores, words):
    assert reason(EQUAL, scores) == words


@pytest.mark.parametrize(("scores", "kept"), [([1, 0], True), ([0, 0], False)])
def test_a_user_function_decides_which_groups_are_accepted(filter_from, scores, kept):
    config = filter_from("def keep(scores): return max(scores) > 0")
    expected = None if kept else f"keep in {config.path} returned False"
    assert reason(config, scores) == expected


def test_a_function_receives_the_prompt_and_lists_of_floats(filter_from):
    config = filter_from("""
        def keep(prompt, scores, rewards):
            assert prompt.uid == "3:7:0" and prompt.ground_truth == "5"
            assert scores == [1.25, 0.25] and type(scores) is list and type(scores[0]) is float
            assert rewards == {"right": [1.0, 0.0], "form": [1.0, 1.0]} and type(rewards) is dict
            return True
    """)
    assert reason(config, [1.25, 0.25], right=[1, 0], form=[1, 1]) is None


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("__import__('numpy').eye(2) > 0", r"array\(\[\[ ?True.*\)"),
        ("(True for _ in scores)", "<generator .*>"),
    ],
)
def test_a_return_value_that_is_not_a_bool_is_an_error_with_function_file_and_uid(
    filter_from, body, shown
):
    config = filter_from(f"def keep(scores): return {body}")
    words = rf"^filter, uid 3:7:0: keep in /.*filter\.py returned {shown}, not True or False$"
    with pytest.raises(RewardError, match=words):
        reason(config, [1, 0])


def test_an_exception_is_reported_with_line_and_uid(filter_from):
    config = filter_from("def keep(rewards):\n    return rewards['x']")
    message = r"^filter, uid 3:7:0: keep at /.*filter\.py:2: KeyError: 'x'$"
    with pytest.raises(RewardError, match=message):
        reason(config, [1, 0])
    with pytest.raises(RewardError, match=r"SystemExit: 3$"):
        reason(filter_from("def keep(): raise SystemExit(3)"), [1, 0])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "def keep(tokens, scores, uid): return True",
            r"filter\.function=keep: in /.*filter\.py requires tokens, uid; "
            r"available, by keyword: prompt, scores, rewards",
        ),
        ("async def keep(): return True", r"filter\.function=keep: in /.*\.py must not be async"),
    ],
)
def test_an_unusable_function_is_refused(filter_from, source, words):
    config = filter_from(source)
    with pytest.raises(ConfigError, match=f"^{words}$"):
        build_group_filter(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "function", "function": "keep"}, "filter.path=: missing"),
        ({"path": "a.py"}, "filter.path=a.py: has no effect with filter.kind=none"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, words):
    with pytest.raises(ConfigError) as caught:
        FilterConfig(**settings)
    assert str(caught.value) == words
