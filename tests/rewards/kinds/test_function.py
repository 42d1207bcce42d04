import inspect
import math
import textwrap

import pytest
from msgspec.structs import replace

from streamrl.errors import ConfigError, RewardError
from streamrl.user_code.reward_function import FunctionSource, UserFunction, make_reward_handler
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from tests.rewards.judged import prompt, score_completions, scores


class InProcessReward:
    """Runs the worker's handler in this process."""

    def __init__(self, source):
        self.source, self.judge = source, make_reward_handler(source)

    async def score(self, row, completions):
        results = self.judge((row, completions, {}))
        return await results if inspect.isawaitable(results) else results


@pytest.fixture
def reward_from(tmp_path):
    """Create rewards from the source of a file with function `name`."""

    def make(source, name="f", **kwargs):
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source))
        return InProcessReward(FunctionSource(str(path), name, tuple(kwargs.items())))

    return make


SIGNATURES = [
    (
        "def f(prompt, completion, scale=2): return scale * (completion == prompt.ground_truth)",
        [2, 0],
    ),
    (
        """
        def f(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "sums" and extra_info == {"n": 1, "solution": "6"}
            return {"score": float(solution_str == ground_truth), "acc": True}
        """,
        [1, 0],
    ),
    ("def f(solution_str, ground_truth): return solution_str == ground_truth", [1, 0]),
    ("def f(solution_str, ground_truth, **kwargs): return len(kwargs)", [2, 2]),
    (  # The row is the same for the next completion.
        """
        def f(solution_str, ground_truth, extra_info):
            extra_info["n"] += 1
            return extra_info["n"]
        """,
        [2, 2],
    ),
    (
        """
        def f(data_sources, solution_strs, ground_truths, extra_infos, scale=2.0):
            assert data_sources == ["sums"] * 2 and ground_truths == ["5"] * 2
            extra_infos[0]["n"] = 9
            return [scale * info["n"] for info in extra_infos]
        """,
        [18, 2],
    ),
    (
        """
        def f(prompts, completions, solution, **columns):
            assert prompts == [[{"role": "user", "content": "2+3="}]] * 2
            assert columns["ground_truth"] == ["5", "5"]
            return [float(c[0]["content"] == s) for c, s in zip(completions, solution)]
        """,
        [0, 1],
    ),
    ("async def f(completions): return [1] * len(completions)", [1, 1]),
    (
        """
        class Judge:
            async def __call__(self, prompt, completion): return 0.5
        f = Judge()
        """,
        [0.5, 0.5],
    ),
]


@pytest.mark.parametrize(("source", "numbers"), SIGNATURES)
async def test_each_signature_receives_row_and_completions(reward_from, source, numbers):
    row = prompt(n=1, solution="6")
    assert await scores(reward_from(source), row=row) == numbers
    assert row.extra_info == {"n": 1, "solution": "6"}


async def test_the_trl_signature_receives_text_for_rows_without_chat(reward_from):
    reward = reward_from("""
        def f(prompts, completions):
            assert prompts == ["2+3=", "2+3="]
            return [len(c) for c in completions]
    """)
    row = replace(prompt(), is_chat=False)
    assert await scores(reward, ["5", "five"], row=row) == [1.0, 4.0]


async def test_a_dict_has_pass_flag_and_answer(reward_from):
    reward = reward_from("""
        def f(solution_str, ground_truth):
            return {"score": -1, "acc": solution_str == ground_truth, "pred": int(solution_str)}
    """)
    assert await score_completions(reward) == [
        RewardResult(-1.0, RewardOutcome.PASS, "5", extra_metrics=(("acc", 1.0),)),
        RewardResult(-1.0, RewardOutcome.WRONG, "6", extra_metrics=(("acc", 0.0),)),
    ]


@pytest.mark.parametrize(
    ("returned", "score", "places"),
    [
        ("{'turns': [1, 0.5]}", 1.5, {"turn_scores": (1.0, 0.5)}),
        ("{'score': 3, 'tokens': numpy.array([1, 2.5])}", 3.0, {"token_scores": (1.0, 2.5)}),
        ("{'spans': [(0, 1, 2), [1, 2, -1]]}", 1.0, {"span_scores": ((0, 1, 2.0), (1, 2, -1.0))}),
    ],
)
async def test_a_dict_places_parts_of_the_score(reward_from, returned, score, places):
    reward = reward_from(f"import numpy\ndef f(prompt, completion): return {returned}")
    (result, _) = await score_completions(reward)
    outcome = RewardOutcome.PASS if score >= 1 else RewardOutcome.WRONG
    assert result == RewardResult(score, outcome, **places)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'turns': []}", "completion 0: turns must be a list of numbers"),
        ("{'spans': [(0, 1.5, 1)]}", "completion 0: spans must be a list of"),
        ("{'turns': 1}", "returned 1 for completion 0: turns must be a list of numbers"),
        ("{'tokens': [1, None]}", "completion 0: tokens must be a list of numbers"),
        ("{'spans': [(1, 2)]}", r"completion 0: spans must be a list of \(start, end, score\)"),
        ("[1, 2]", "for completion 0, not a finite number"),
    ],
)
async def test_unusable_places_are_errors(reward_from, returned, message):
    with pytest.raises(RewardError, match=message):
        await scores(reward_from(f"def f(prompt, completion): return {returned}"))


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("(prompt, completion, completion_ids, completion_turns)", "completion_ids"),
        ("(completions, completion_ids, completion_turns)", "completion_ids[0]"),
    ],
)
def test_a_function_may_read_token_ids_and_turns(reward_from, signature, expected):
    reward = reward_from(f"""
        def f{signature}:
            assert completion_turns in (["a", "b"], [["a", "b"]])
            score = {{"tokens": [1.0] * len({expected})}}
            return score if "prompt" in locals() else [score]
    """)
    details = {"completion_ids": [[5, 6, 7]], "completion_turns": [["a", "b"]]}
    (result,) = reward.judge((prompt(), ["a\nb"], details))
    assert result.token_scores == (1.0, 1.0, 1.0)


async def test_only_finite_numbers_of_a_dict_become_extra_metrics(reward_from):
    reward = reward_from("""
        import numpy as np
        def f(solution_str, ground_truth):
            result = {"score": 1, "format": np.float32(0.5), "pred": 3, "text": "x", "none": None}
            return result | {"nan": float("nan"), "list": [1], "ok": True, 5: 6}
    """)
    (result, _) = await score_completions(reward)
    assert result.extra_metrics == (("format", 0.5), ("ok", 1.0), ("5", 6.0))
    many = reward_from("""
        def f(solution_str, ground_truth):
            return {"score": 1} | {f"n{i}": i for i in range(999)}
    """)
    assert len((await score_completions(many))[0].extra_metrics) == 50


async def test_none_abstains_in_the_trl_signature_and_is_an_error_in_other_signatures(reward_from):
    reward = reward_from("def f(completions, **columns): return [None, 0.5]")
    first, second = await score_completions(reward)
    assert first.is_not_judged and math.isnan(first.score)
    assert second == RewardResult(0.5, RewardOutcome.WRONG)
    for source in (
        "def f(prompt, completion): return None",
        "def f(solution_str, ground_truth): return None",
        "def f(solution_strs, ground_truths): return [None, None]",
        "def f(completions): return None",
    ):
        with pytest.raises(RewardError, match="returned"):
            await scores(reward_from(source))


async def test_acc_must_be_a_bool(reward_from):
    reward = reward_from("def f(prompt, completion): return {'score': 1, 'acc': 'no'}")
    with pytest.raises(RewardError, match=r"for completion 0: acc must be true or false"):
        await score_completions(reward)


async def test_kwargs_come_from_the_config(reward_from):
    source = "def f(solution_str, ground_truth, scale): return scale * int(solution_str)"
    assert await scores(reward_from(source, scale=2.5)) == [12.5, 15.0]
    with pytest.raises(
        ConfigError, match=r"rewards\[0\].kwargs.size: f in .* has no such parameter"
    ):
        reward_from(source, scale=1, size=2)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("True", 1.0),
        ("-0.5", -0.5),
        ("__import__('numpy').float32(0.5)", 0.5),
        ("__import__('numpy').bool_(True)", 1.0),
        ("__import__('torch').tensor(0.5)", 0.5),
        ("{'score': 1, 'note': 'x'}", 1.0),
    ],
)
async def test_numbers_of_any_kind_are_scores(reward_from, body, number):
    assert await scores(reward_from(f"def f(prompt, completion): return {body}"), ["5"]) == [number]


@pytest.mark.parametrize(
    "body",
    [
        *("None", "'1.0'", "float('nan')", "float('inf')", "1e300", "10 ** 400", "[1.0]", "1j"),
        *("{}", "{'score': None}", "{'acc': 1.0}", "print"),
        *("__import__('numpy').float16('inf')", "__import__('torch').ones(2)"),
    ],
)
async def test_invalid_results_are_errors_with_function_file_and_completion(reward_from, body):
    reward = reward_from(f"""
        def f(prompt, completion):
            return 1.0 if completion == "5" else {body}
    """)
    message = r"f in .*reward.py returned .* for completion 1, not a finite number"
    with pytest.raises(RewardError, match=message):
        await scores(reward)


@pytest.mark.parametrize(
    "body",
    ["[1.0]", "[1.0] * 3", "1.0", "None", "'ab'", "{'score': 1}", "__import__('numpy').array(1.0)"],
)
async def test_a_group_function_must_return_a_number_per_completion(reward_from, body):
    reward = reward_from(f"def f(completions): return {body}")
    with pytest.raises(RewardError, match=r"f in .*reward.py returned .*, not a list of 2 numbers"):
        await scores(reward)


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("raise GeneratorExit", "GeneratorExit$"),
        ("raise ValueError('x' * 10**6)", "ValueError: x{236}[.]{3}x{248}$"),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda e: 1 / 0})",
            r"Mute: \(its message cannot be formatted\)",
        ),
    ],
)
async def test_an_exception_is_reported_with_its_line(reward_from, kind, statement, words):
    reward = reward_from(f"""
        # line 2
        {kind} f(prompt, completion):
            {statement}
    """)
    with pytest.raises(RewardError, match=rf"f at .*reward.py:4: ({words})") as caught:
        await scores(reward)
    assert "\n" not in str(caught.value)


async def test_a_result_that_raises_on_inspection_is_reported(reward_from):
    reward = reward_from("""
        class Odd(float):
            def __float__(self): raise ValueError("no number")
        def f(prompt, completion): return Odd(1)
    """)
    with pytest.raises(RewardError, match=r"f at .*reward.py:3: ValueError: no number"):
        await scores(reward)


async def test_a_column_the_row_lacks_is_named_before_and_during_the_run(reward_from):
    reward = reward_from("def f(completions, solution, hint=None): return [1.0]")
    check = UserFunction(reward.source).call_spec.build_arguments
    check(prompt(solution="5"), [""], {})
    words = r"f in .*reward.py needs solution; the row has answer, completions, data_source"
    with pytest.raises(RewardError, match=words):
        check(prompt(answer="5"), [""], {})
    with pytest.raises(RewardError, match=words):
        await scores(reward, row=prompt(answer="5"))


@pytest.mark.parametrize(
    "signature",
    [
        *("()", "(text)", "(prompt)", "(solution_str)", "(prompt, completion, /)"),
        *("(prompt, completion, tokenizer)", "(solution_str, ground_truth, model)"),
        "(*args, **columns)",
    ],
)
def test_an_unknown_signature_is_refused_listing_the_supported_signatures(reward_from, signature):
    listed = r"rewards\[0\].function=f: its parameters in .* match none of .*score\(prompt,"
    with pytest.raises(ConfigError, match=listed):
        reward_from(f"def f{signature}: return 1.0")


async def test_files_with_equal_names_are_separate_modules(tmp_path):
    rewards = []
    for number in (1, 2):
        path = tmp_path / str(number) / "reward.py"
        path.parent.mkdir()
        path.write_text(f"def f(prompt, completion): return {number}")
        rewards.append(InProcessReward(FunctionSource(str(path), "f")))
    assert [await scores(reward, ["x"]) for reward in rewards] == [[1.0], [2.0]]
