"""Prompts drawn by difficulty, and replays, in real runs, killed and resumed."""

from pathlib import Path

import pytest

from streamrl.messages import find_replayed_uid
from tests.e2e.launched import Launched, audit, rows, train
from tests.toy import write_toy

REWARD = """
def score(prompt, completion):
    index = prompt.extra_info["index"]
    return 1.0 if index % 3 == 0 else float(len(completion) % 2) if index % 3 == 1 else 0.0
"""


@pytest.mark.slow
def test_a_killed_run_draws_the_prompts_by_difficulty_and_replays_of_an_undisturbed_run(
    tmp_path: Path,
):
    toy = write_toy(tmp_path)
    (toy / "third.py").write_text(REWARD)
    words = [
        "run.steps=24",
        "data.sampling=difficulty",
        "data.replay={frac: 0.3, size: 6, max_age: 8}",
        "algorithm.correction={proximal: trainer, weights: token}",
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
    sources = [source for uid in drawn if (source := find_replayed_uid(uid))]
    assert sources and {*sources} < {*audit(killed_dir).trained}
    replays = [row["replay/groups"] for row in rows(killed_dir)]
    assert 0 < sum(replays) <= len(sources)
    ages = [row["replay/age_max"] for row in rows(killed_dir) if row["replay/groups"]]
    assert all(1 <= age <= 8 for age in ages)
    drawn = [uid for uid in drawn if find_replayed_uid(uid) is None]
    indices = [int(uid.split(":")[1]) for uid in drawn]
    assert max(map(indices.count, indices)) > 1 < last["prompts/seen"], "epochs that never repeat"
    again = [int(uid.split(":")[1]) for uid in drawn if not uid.startswith("0:")]
    rows_by_rate = [sum(index % 3 == rest for index in again) for rest in range(3)]
    assert rows_by_rate[1] > max(rows_by_rate[0], rows_by_rate[2])
