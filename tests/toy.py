"""A toy run on disk: a random Qwen2 with one token per character, sums as prompts, a recipe."""

import json
from pathlib import Path

SYMBOLS = ["<pad>", "<bos>", "<eos>", *"0123456789+-= "]

RECIPE = """
model: {{path: {folder}/model}}
data: {{train: {folder}/rows.jsonl, eval: {folder}/rows.jsonl}}
run: {{name: toy, steps: 3}}
algorithm: {{group_size: 4}}
pipeline: {{groups_per_step: 4, micro_batch_tokens: 128}}
queue: {{shards: 2}}
generator: {{max_new_tokens: 6, max_concurrent_rollouts: 32}}
rewards: [{{kind: exact}}]
trainer: {{lr: 1.0e-3}}
evaluation: {{limit: 8, samples: 2}}
telemetry: {{console: plain, wandb: {{mode: disabled}}}}
"""


def write_toy(folder: Path) -> Path:
    """Write model/, rows.jsonl and recipe.yaml into a folder; return the folder."""
    write_model(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(100):
            a, b = i % 10, i // 10
            row = {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": f"{a}+{b}"}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": i},
            }
            file.write(json.dumps(row) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def write_model(path: Path, *, seed: int = 0) -> None:
    """Write a Qwen2 with 0.1 M random parameters, and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
