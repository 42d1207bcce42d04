"""Chat templates of TRL's package, as models publish them, and tokenizers with their tokens."""

import functools
import re
from importlib.metadata import distribution
from pathlib import Path

from streamrl.data.chat_template import ChatTemplate
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from tests.bpe_tokenizer import make_byte_tokenizer

FAMILIES = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "deepseekv3": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "lfm2_2_5": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|end_of_text|>"],
    "llama3_1": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    "llama3_2": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    "muse_glimmer": ["<|eot|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "qwen2_5": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_5_think": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_8": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_vl": ["<|im_end|>", "<|endoftext|>"],
}
"""Tokens that end a turn of each family: eos_token, and those of its generation_config.json."""
EXTRA_TOKENS = {
    "llama3_2": ["<|python_tag|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
}
"""Tokens of a vocabulary that its template does not write."""
_SPECIAL = re.compile(
    "<\uff5c(?:begin|end)\u2581of\u2581sentence\uff5c>|"
    r"<\|[^|'\"{}\s]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]+\]"
    r"|<(?:start|end)_of_turn>|<[be]os>"
)
# DeepSeek declares even the tokens of its roles as not special.
_PLAIN = re.compile(
    "</?(?:think|tool_call|tool_response|arg_key|arg_value)>|<\uff5c[^\uff5c'\"{}]+\uff5c>"
)


@functools.cache
def load_published(name):
    """Return the renderer of a family: its template, and a byte-level tokenizer with its tokens."""
    folder = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    source = (folder / f"{name}.jinja").read_text()
    ends = FAMILIES[name]
    special = sorted({*_SPECIAL.findall(source), *ends, *EXTRA_TOKENS.get(name, [])})
    plain = sorted(set(_PLAIN.findall(source)) - {*special})
    tokenizer = make_byte_tokenizer(special, plain, eos_token=ends[0], bos_token=ends[-1])
    end_token_ids = tokenizer.convert_tokens_to_ids(ends)
    template = ChatTemplate(source, name)
    return TurnRenderer(tokenizer, template, end_token_ids=end_token_ids)
