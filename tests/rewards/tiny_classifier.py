"""A sequence-classification model with 0.1 M random parameters, on disk."""

from pathlib import Path

from tests.toy import write_model


def write_classifier(path: Path, **settings) -> str:
    """Write the toy's model with a head of one logit per label; `settings` override its config."""
    import torch
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    write_model(path)
    config = AutoConfig.from_pretrained(path, **{"num_labels": 1, **settings})
    torch.manual_seed(1)
    model = Qwen2ForSequenceClassification(config)
    # Large weights, so that the logits of different texts differ clearly.
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return str(path)
