"""Sampling settings of `streamrl evaluate`: the command line overrides the run or recipe."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from streamrl.cli.evaluate import add_arguments, choose_sampling
from streamrl.stream.evaluation.config import EvaluationConfig


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["runs/mine", *words])


def test_options_override_the_runs_evaluation_settings():
    run = EvaluationConfig(samples=32, temperature=0.5, top_p=0.7, top_k=9, limit=3, seed=4)
    assert choose_sampling(parse(), run) == run
    changed = choose_sampling(parse("--samples", "8", "--temperature", "0", "--seed", "0"), run)
    assert changed == replace(run, samples=8, temperature=0.0, seed=0)


def test_a_file_named_twice_is_refused(tmp_path: Path, refuse):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    error = refuse("evaluate", tmp_path, "--data", "a.jsonl", "--data", "a.jsonl")
    assert "--data: a file is named twice" in error
