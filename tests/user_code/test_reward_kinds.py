"""Reward kinds of user files and installed packages."""

import pytest

from streamrl.errors import ConfigError
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "@reward('a')\ndef f(prompt, completion): return 1\n"
            "@reward('a')\ndef g(prompt, completion): return 2",
            r"kinds.py:4: ValueError: kind a is registered twice",
        ),
        ("@reward('a b')\ndef f(prompt, completion): return 1", "kind 'a b': letters, digits"),
    ],
)
async def test_registering_a_kind_twice_or_with_an_invalid_name_is_refused(tmp_path, source, words):
    path = tmp_path / "kinds.py"
    path.write_text(f"from streamrl.rewards import reward\n{source}\n")
    with pytest.raises(ConfigError, match=words):
        await build_rewards([RewardConfig("a", options={"path": str(path)})]).run_preflight()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('broken')", r"kinds_of_mine.py:1: ValueError: broken"),
        ("judge = 3", "kinds_of_mine:judge is not a function"),
        ("", "AttributeError"),
    ],
)
async def test_an_installed_kind_that_fails_to_load_gives_one_line(
    tmp_path, monkeypatch, source, words
):
    dist_info = tmp_path / "mine-1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text("[streamrl.rewards]\nmine = kinds_of_mine:judge\n")
    (tmp_path / "kinds_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"rewards\[0\].kind=mine: .*{words}") as caught:
        await build_rewards([RewardConfig("mine")]).run_preflight()
    assert "\n" not in str(caught.value)
