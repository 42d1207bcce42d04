import numpy as np
import pytest

from streamrl.data.config import DataConfig, parse_data_files
from streamrl.data.prompt_file import PromptLimits, load_prompts
from streamrl.errors import ConfigError

# Tokens of the template, "<user>" + text + "</s>" + "<assistant>"; the text has one per byte.
FRAME = 3


def load(path, tokenizer, *, vocab_size=300, environments=None):
    files = parse_data_files(path, key="data.train")
    limits = PromptLimits(20, vocab_size, environments=environments)
    (loaded,) = load_prompts(files, tokenizer, limits)
    return loaded.prompts


def test_prompts_carry_the_row_and_int32_tokens(tokenizer, write_rows):
    path = write_rows(
        {"prompt": "abc", "data_source": "letters", "ground_truth": "d", "extra_info": {"n": 3}}
    )
    (prompt,) = load(path, tokenizer)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.shape == (FRAME + 3,)
    assert (prompt.uid, prompt.data_source, prompt.ground_truth) == ("0:0:0", "letters", "d")
    assert prompt.extra_info["n"] == 3


def test_a_row_may_name_its_environment(tokenizer, write_rows):
    path = write_rows({"prompt": "a", "environment": "guess"}, {"prompt": "b"})
    (named, other) = load(path, tokenizer)
    assert (named.environment, other.environment) == ("guess", "")
    assert "environment" not in named.extra_info
    path = write_rows({"prompt": "a", "environment": "b"}, {"prompt": "a", "environment": "a"})
    prompts = load(path, tokenizer, environments=("a", "b"))
    assert [prompt.environment for prompt in prompts] == ["b", "a"]


NAMED, UNNAMED = {"prompt": "a", "environment": "gues"}, {"prompt": "a"}


@pytest.mark.parametrize(
    ("row", "environments", "message"),
    [
        (UNNAMED, ("guess", "other"), "column environment=: must be one of guess, other"),
        (NAMED, ("guess", "other"), "column environment=gues: must be one of guess, other"),
        (NAMED, ("",), "column environment=gues: the run has none with a name"),
        (NAMED, (), "column environment=gues: the run has none with a name"),
        ({"prompt": "a", "environment": 3}, ("guess",), "environment must be text, got int"),
    ],
)
def test_a_row_without_one_of_the_environments_of_the_run_is_refused(
    tokenizer, write_rows, row, environments, message
):
    path = write_rows(row)
    with pytest.raises(ConfigError) as caught:
        load(path, tokenizer, environments=environments)
    assert str(caught.value).startswith(f"{path} line 1: {message}")


@pytest.mark.parametrize("environments", [(), ("",), None])
def test_a_row_needs_no_name_for_the_only_environment(tokenizer, write_rows, environments):
    (prompt,) = load(write_rows(UNNAMED), tokenizer, environments=environments)
    assert prompt.environment == ""


def test_a_longer_prompt_is_an_error_with_row_and_length(tokenizer, write_rows):
    path = write_rows({"prompt": "x"}, {"prompt": "x" * 18})
    with pytest.raises(ConfigError) as caught:
        load(path, tokenizer)
    assert str(caught.value).startswith(
        f"{path} line 2: the prompt has 21 tokens, the limit is 20 "
    )


def test_a_token_outside_the_vocabulary_is_refused(tokenizer, write_rows):
    path = write_rows({"prompt": "a"})
    largest = max(load(path, tokenizer)[0].token_ids)
    load(path, tokenizer, vocab_size=largest + 1)
    with pytest.raises(ConfigError, match=rf"line 1: .*token id {largest}, .* has {largest} ids"):
        load(path, tokenizer, vocab_size=largest)


def test_a_prompt_without_tokens_is_refused(tokenizer, write_rows):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="line 1: the prompt has no tokens"):
        load(write_rows({"prompt": ""}), tokenizer)


def test_the_prompt_limit_is_the_rest_of_the_context():
    assert DataConfig().compute_prompt_limit(model_tokens=100, max_new_tokens=30) == 70
    config = DataConfig(max_prompt_tokens=70)
    assert config.compute_prompt_limit(model_tokens=100, max_new_tokens=30) == 70
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens=70: must be at most 69: "):
        config.compute_prompt_limit(model_tokens=99, max_new_tokens=30)
    with pytest.raises(ConfigError, match=r"generator.max_new_tokens=99: no tokens are left"):
        config.compute_prompt_limit(model_tokens=99, max_new_tokens=99)
