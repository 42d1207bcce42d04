"""Prompts drawn by difficulty in real runs, killed and resumed."""

from pathlib import Path

import pytest

from tests.e2e.launched import Launched, audit, rows, train
from tests.toy import write_toy

REWARD = """
def score(prompt, completion):
    index = prompt.extra_info["index"]
    return 1.0 if index % 3 == 0 else float(len(completion) % 2) if index % 3 == 1 else 0.0
"""


@pytest.mark.slow
def test_a_killed_run_that_samples_by_difficulty_draws_the_prompts_of_an_undisturbed_run(
    tmp_path: Path,
):
    toy = write_toy(tmp_path)
    (toy / "third.py").write_text(REWARD)
    words = [
        "run.steps=14",
        "data.sampling=difficulty",
        "pipeline.max_staleness=0",
        "checkpoint.every=5",
        "filter.kind=equal_rewards",
        f"rewards=[{{kind: function, path: {toy}/third.py, function: score}}]",
    ]
    whole, whole_dir = train(toy, "whole", *words)
    whole.finish()
    killed, killed_dir = train(toy, "killed", *words)
    killed.until(lambda: len(rows(killed_dir)) >= 8)
    killed.kill()
    Launched(["train", "--resume", str(killed_dir)], toy).finish()

    drawn, expected = list(audit(killed_dir).admitted), list(audit(whole_dir).admitted)
    assert drawn == expected
    last = rows(killed_dir)[-1]
    counted = sum(last[f"ledger/{name}"] for name in ("trained", "filtered", "dropped"))
    assert last["ledger/admitted"] == counted + last["ledger/in_flight"]
    indices = [int(uid.split(":")[1]) for uid in drawn]
    assert max(map(indices.count, indices)) > 1 < last["prompts/seen"], "epochs that never repeat"
    rows_by_rate = [sum(index % 3 == rest for index in indices) for rest in range(3)]
    assert rows_by_rate[1] > max(rows_by_rate[0], rows_by_rate[2])
