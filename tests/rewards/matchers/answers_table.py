"""200 answers, and the rules that score each as right.

`make parity` compares the scores with verl's; see tests/parity/verl_rewards.py.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from streamrl.rewards.kinds import math_answers
from streamrl.user_code.reward_result import RewardResult

#: Matchers by their letter in ANSWERS.
RULES: Mapping[str, Callable[[str, str], RewardResult]] = {
    "s": math_answers.judge_gsm8k,
    "f": partial(math_answers.judge_gsm8k, method="flexible"),
    "m": math_answers.judge_math,
    "d": math_answers.judge_dapo_math,
    "b": partial(math_answers.judge_dapo_math, strict_box=True),
}


def score(truth: str, letters: str, *completions: str) -> Iterator[tuple[str, str, str]]:
    """Yield completions that exactly the matchers of these letters score 1 for a ground truth."""
    for completion in completions:
        yield completion, truth, letters


#: Completion, ground truth, and the letters of the matchers that score it 1.
ANSWERS = [
    # GSM8K as its answers are written
    *score("9", "sf", "She has 16 - 7 = 9 eggs.\n#### 9", "#### 9", "##### 9", "#### 9%"),
    *score("9", "sf", "#### 9 apples", "#### 3\n#### 9"),
    *score("9", "", "She has 16 - 7 = 9 eggs.\n#### 8", "#### nine", "#### 09", "#### 9.0"),
    *score("9", "", "#### 9\n#### 3", "####", "#### ", "#### ,"),
    *score("9", "f", "####9", "####  9", "####\n9", "#### +9", "#### 9.", "#### $9"),
    *score("-9", "sf", "#### -9"),
    *score("-9", "", "#### - 9"),
    *score("9.5", "sf", "#### 9.5"),
    *score("0.5", "", "#### .5"),
    *score(".5", "sf", "#### .5"),
    *score("9.", "sf", "#### 9."),
    *score("9", "s", "#### 9/2"),
    *score("1234", "sf", "#### 1,234"),
    *score("1,234", "sf", "#### 1,234", "#### 1234"),
    *score("1234", "", "#### 1 234"),
    *score("9 ", "sf", "#### 9"),
    *score("1.2.3", "sf", "#### 1.2.3"),
    *score("3", "sf", "#### 9 #### 3"),
    # a number in prose
    *score("9", "f", "The answer is 9", "The answer is 9.", "The answer is 9, I think."),
    *score("9", "f", "9 eggs ... ", "9 eggs . Done .", "It is 9.\nWe are done, aren't we"),
    *score("1234", "f", "It is 1,234.", "It is 1,234 , or so"),
    *score("1,234", "f", "It is 1,234"),
    *score("9", "", "from 5-9", "nine", "9 or 3", "", " \n\t ", "\u0669"),
    *score("-9", "f", "from 5-9", "temperature -9 degrees"),
    *score("2", "f", "1/2"),
    *score(".5", "", "0.5"),
    *score("-.5", "f", "-.5"),
    *score("3", "f", "9 or 3", "9e3"),
    # the windows of 300 and of 100 characters
    *score("9", "sf", "x" * 500 + " #### 9", "#### 9" + " " * 294),
    *score("9", "f", "#### 9" + " " * 295, "#### 19" + "x" * 299, "It is 9" + "x" * 299),
    *score("9", "f", "It is 19" + "x" * 299, "Answer: 9\n" + "x" * 291),
    *score("9", "", "#### 9" + " " * 1000, "It is 9" + "x" * 300, "Answer: 9\n" + "x" * 1000),
    *score("9", "fd", "Answer: 9\n" + "x" * 290, "So " * 1000 + "Answer: 9"),
    *score("9", "fmdb", r"\boxed{9}" + "x" * 91, "x" * 1000 + r"\boxed{9}"),
    *score("9", "fm", r"\boxed{9}" + "x" * 92),
    *score("9", "m", r"\boxed{9}" + "x" * 1000),
    *score("1" * 120, "fm", r"\boxed{" + "1" * 120 + "}"),
    # DAPO's line
    *score("34", "fd", "Answer: 34", "answer:34", "ANSWER : 34", "The final answer: 34"),
    *score("34", "fd", "Answer:\n34", "Answer: 12\nAnswer: 34", "Answer: 34\nAnswer:"),
    *score("34", "fd", "Answer: 34\n\nThat is all.", "Answer: $34$", "Answer: $34$."),
    *score("34", "fd", "Answer: x = 34", r"Answer: \$34", "Answer: $34", "Answer: 34 dollars"),
    *score("34", "fd", r"Answer: 34\text{ cm}", r"Answer: 34^\circ", "Answer: 34 degrees"),
    *score("34", "fd", "Answer: 34 square units", "Answer: the $34$th", r"Answer: 34\mathrm{th}"),
    *score("34", "fd", r"\boxed{12}" + "\nAnswer: 34"),
    *score("34", "", "Answer: 43", "Answer:", "Answer: 34\nAnswer: 12", "Answer: 034"),
    *score("34", "f", "Answer 34", "Answer: 12 Answer: 34", "Answer: 34 (as shown)", "Answer: 34."),
    *score("34", "f", "**Answer:** 34", "**Answer**: 34", "Answer: **34**", r"Answer: \(34\)"),
    *score("34", "f", "Answer: 34%", r"Answer: 34\%", "Answer: 34 miles", "Answer: 34\u00b0"),
    *score("34", "fmdb", r"Answer: $\boxed{34}$", r"Answer: \boxed{34}"),
    *score("1234", "fd", "Answer: 1,234"),
    *score("1,234", "fd", "Answer: 1,234"),
    *score("1234", "d", r"Answer: 1{,}234"),
    *score("1234.5", "f", "Answer: 1,234.5"),
    *score("-34", "fd", "Answer: -34"),
    *score("-34", "", "Answer: \u221234"),
    *score("square root", "", "Answer: a square"),
    *score("even", "d", r"Answer: \text{even}"),
    *score(r"\frac{1}{2}", "d", r"Answer: \frac12"),
    *score("1/2", "", r"Answer: \frac{1}{2}", "Answer: 0.5"),
    *score("1/2", "d", "Answer: 1/2"),
    *score(r"\sqrt{2}", "d", r"Answer: \sqrt2"),
    *score(r"\frac{1}{2}", "", r"Answer: \dfrac{1}{2}"),
    *score("34", "fmb", "Answer: 12\n" + r"\boxed{34}", r"Answer: 12 \boxed{34}"),
    # boxes
    *score("34", "fmdb", r"So $\boxed{34}$.", r"\boxed{12}, no, \boxed{34}", r"\boxed{ 34 }"),
    *score("34", "fmdb", r"\fbox{12} or \boxed{34}", r"\boxed{34}}", r"\boxed{\boxed{34}}"),
    *score("34", "", r"So $\boxed{43}$.", r"\boxed{34}, no, \boxed{12}", r"\boxed{}"),
    *score("34", "", r"\boxed{34} and \boxed{1"),
    *score("34", "fm", r"\boxed 34", r"$\boxed 34$ it is", r"\fbox{34}", r"\boxed{x=34}"),
    *score("34", "fm", r"\boxed{x = 34}"),
    *score("34", "f", r"\boxed {34}", r"\boxed34", r"\boxed{34", r"\boxed{abc=34}"),
    *score("34", "fdb", r"\boxed{34} is \boxed"),
    *score("x=34", "m", r"\boxed{34}"),
    # LaTeX that means the same, or nearly
    *score(r"\frac{1}{2}", "mdb", r"\boxed{\frac{1}{2}}"),
    *score(r"\frac{1}{2}", "m", r"\boxed{\dfrac{1}{2}}", r"\boxed{\tfrac12}", r"\boxed{\frac1{2}}"),
    *score(r"\frac{1}{2}", "m", r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{.5}"),
    *score(r"\frac12", "mdb", r"\boxed{\frac12}"),
    *score(r"\frac{1}{2}", "", r"\boxed{\frac{1}2}", r"\boxed{0.50}"),
    *score(r"\frac{1}{4}", "", r"\boxed{0.25}"),
    *score(r"-\frac{1}{2}", "", r"\boxed{-1/2}"),
    *score(r"\frac{\sqrt3}{2}", "m", r"\boxed{\frac{\sqrt{3}}{2}}"),
    *score(r"\frac{1}{1+\frac1x}", "m", r"\boxed{\frac{1}{1+\frac{1}{x}}}"),
    *score(r"\sqrt{2}", "m", r"\boxed{\sqrt2}"),
    *score(r"2^{1/2}", "", r"\boxed{\sqrt{2}}"),
    *score("x+1", "m", r"\boxed{x + 1}"),
    *score("x+1", "", r"\boxed{1+x}"),
    *score("50", "fm", r"\boxed{50\%}"),
    *score(r"50\%", "", r"\boxed{50%}"),
    *score("5", "fm", r"\boxed{\$5}", r"\boxed{5\text{ cm}}"),
    *score("90", "fm", r"\boxed{90^\circ}", r"\boxed{90^{\circ}}"),
    *score("5", "f", r"\boxed{5\text{cm}}", r"\boxed{5 cm}"),
    *score("5", "m", r"\boxed{5 \text{ cm}^2}"),
    *score(r"3\text{ red},2\text{ blue}", "m", r"\boxed{3\text{ red}, 2\text{ blue}}"),
    *score("Monday", "", r"\boxed{\text{Monday}}"),
    *score("1234", "f", r"\boxed{1,234}"),
    *score("1,234", "m", r"\boxed{1,\!234}"),
    *score("1,234", "", r"\boxed{1{,}234}"),
    *score("(1,2)", "m", r"\boxed{(1, 2)}", r"\boxed{\left(1,2\right)}"),
    *score(r"\{1,2\}", "mdb", r"\boxed{\{1,2\}}"),
    *score(r"\begin{pmatrix}1\\2\end{pmatrix}", "mdb", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    *score("0", "", r"\boxed{-0}"),
    *score("34", "m", "\\boxed{3\n4}"),
    *score(r"\pi", "mdb", r"\boxed{\pi}"),
    *score("3.14", "", r"\boxed{\pi}"),
    *score(r"\pi", "", "\\boxed{\u03c0}"),
    *score("E", "", r"\boxed{e}"),
    # several forms at once, and attempts to say everything
    *score("34", "sfmdb", r"#### 34" + "\n" + r"\boxed{34}" + "\nAnswer: 34"),
    *score("34", "sfmdb", r"#### 34" + "\n" + r"\boxed{34}"),
    *score("34", "f", "#### 1 2 3 34", r"\boxed{1, 2, 34}", "Answer: 1, 2, 34"),
    *score("34", "", "Answer: 1\nAnswer: 2\nAnswer: 34" + "\nAnswer: 5", "34" * 100),
    *score("34", "sf", "#### 34" * 100),
    *score("34", "fmdb", r"\boxed{34}" * 100),
]
