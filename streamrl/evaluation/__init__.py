"""Evaluation of the policy on held-out prompts. Depends on neither Ray nor an engine."""

from streamrl.evaluation.config import MAX_SEED, EvaluationConfig
from streamrl.evaluation.metrics import EvaluationResult
from streamrl.evaluation.sample_and_score import evaluate_policy

__all__ = ["MAX_SEED", "EvaluationConfig", "EvaluationResult", "evaluate_policy"]
