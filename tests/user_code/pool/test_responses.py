"""Responses of workers, which run untrusted code."""

import pickle

import pytest

from streamrl.user_code.pool.process import unpickle_response
from streamrl.user_code.pool.worker import HEADER, pack_message
from streamrl.user_code.reward_function import FunctionCallSpec
from streamrl.user_code.reward_result import RewardResult


def pickle_of_call(module: str, name: str, *arguments: object) -> bytes:
    """Return a pickle that calls a function when unpickled."""
    pickled_name = b"".join(pickle.dumps(text, protocol=4)[2:-1] for text in (module, name))
    pickled_arguments = pickle.dumps(arguments, protocol=2)[2:-1]
    return (
        b"\x80\x04"
        + pickled_name
        + pickle.STACK_GLOBAL
        + pickled_arguments
        + pickle.REDUCE
        + pickle.STOP
    )


def test_responses_survive_a_round_trip():
    call_spec = FunctionCallSpec(
        "f of x.py", "style", frozenset("ab"), frozenset("a"), False, (("k", [1]),)
    )
    results = RewardResult.from_correctness(True, "7"), RewardResult.make_not_judged().outcome
    for response in ([*results], call_spec, [1.5, None], "no result"):
        assert unpickle_response(pack_message((1, response))[HEADER.size :]) == (1, response)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("streamrl.user_code.sandbox.jail", "subprocess.Popen"),
        ("streamrl.user_code.reward_function", "FileFunction"),
        ("streamrl.user_code.reward_result", "Enum"),
        ("streamrl.user_code.reward_result", "RewardResult.from_correctness"),
        ("streamrl.user_code.reward_result", "math.__loader__.load_module"),
        ("streamrl.user_code.pool.process", "WorkerProcess"),
        ("streamrl.user_code.pool.process", "subprocess.Popen"),
    ],
)
def test_unpickling_a_response_rejects_other_classes_and_functions(
    module: str, name: str, tmp_path
):
    note = tmp_path / "ran"
    with pytest.raises(pickle.UnpicklingError, match=f"{name} is not an allowed class"):
        unpickle_response(pickle_of_call(module, name, ["touch", str(note)]))
    assert not note.exists()
