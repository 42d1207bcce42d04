"""How good the policy is on prompts it is not trained on. Runtime-free."""

from streamrl.evaluation.config import MAX_SEED, EvaluationConfig
from streamrl.evaluation.figures import EvaluationResult
from streamrl.evaluation.sampling import evaluate

__all__ = ["MAX_SEED", "EvaluationConfig", "EvaluationResult", "evaluate"]
