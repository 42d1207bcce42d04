"""A run with a user's own template, filter, rewards, judge and combination."""

from pathlib import Path

import pytest

from streamrl.telemetry.rollout_log import read_recorded_groups
from tests.e2e.launched import Launched, events, rows
from tests.rewards.chat_server import MODEL, serving
from tests.toy import write_toy

pytestmark = pytest.mark.slow

OWN = """
import subprocess

started = []

def even(prompt):
    return prompt.extra_info["index"] % 2 == 0

def compute_score(data_source, solution_str, ground_truth, extra_info, tokens=0):
    return 0.25 if extra_info["index"] % 2 == 0 else -1.0

def rendered(prompt, completion):
    started or started.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
    return float(len(prompt.token_ids))
"""
RECIPE = """
model: {{path: {toy}/model}}
data:
  train: {{path: {toy}/rows.jsonl, template: {toy}/chat.jinja, filter: "{toy}/own.py:even"}}
run: {{name: own, steps: 3}}
algorithm: {{group_size: 4}}
pipeline: {{groups_per_step: 4, micro_batch_tokens: 128}}
generator: {{max_new_tokens: 6}}
rewards:
  - {{kind: function, name: mine, path: {toy}/own.py, function: compute_score, replicas: 1}}
  - {{kind: function, name: rendered, path: {toy}/own.py, replicas: 1, weight: 0}}
  - kind: judge
    name: taste
    url: {url}
    model: {model}
    template: "Which mark, from 0 to 10? {{prompt}} {{completion}} [{{ground_truth}}]"
    pattern: 'mark: (\\d+)'
    most: 10
    weight: 2
scorer: {{replicas: 2}}
telemetry: {{console: plain, wandb: {{mode: disabled}}}}
checkpoint: {{at_end: false}}
"""


def test_a_run_uses_a_users_judge_function_filter_and_template(tmp_path: Path):
    toy = write_toy(tmp_path)
    (toy / "own.py").write_text(OWN)
    (toy / "chat.jinja").write_text("{{ messages[0].content }}+0=")
    with serving(lambda content: "It is fair, mark: 7 of 10") as server:
        (toy / "own.yaml").write_text(RECIPE.format(toy=toy, url=server.url, model=MODEL))
        run = Launched(["train", str(toy / "own.yaml"), f"run.dir={toy}/runs"], toy)
        run.finish()
    run_dir = toy / "runs" / "own"
    notes = " ".join(event["text"] for event in events(run_dir, "note"))
    assert f"50 prompts skipped, filtered by {toy}/own.py:even" in notes
    metrics = rows(run_dir)
    assert len(metrics) == 3
    for row in metrics:
        assert row["reward/mine"] == 0.25, "only even rows are kept"
        assert row["reward/rendered"] == len("1+2+0="), "the template is the file's"
        assert row["reward/taste"] == 7.0
        assert row["reward/mean"] == pytest.approx(14.25)
    questions = {request["messages"][0]["content"] for request in server.requests}
    assert all(question.startswith("Which mark, from 0 to 10? ") for question in questions)
    # One per trained rollout; more for rollouts that were in flight at the end.
    assert len(server.requests) >= 3 * 4 * 4
    group = read_recorded_groups(run_dir, 1)[0]
    completion = group.rollouts[0].completion
    question = f"{group.prompt[0]['content']} {completion} [{group.ground_truth}]"
    assert f"Which mark, from 0 to 10? {question}" in questions
