"""The group of a broadcast: what its members agree on before anything is sent."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.weights.transports.collective_group import (
    PUBLISHER_RANK,
    BroadcastGroup,
    GroupEpoch,
    SharedDeadline,
    join_store,
    serve_readers,
)

TIMEOUT_S = 20.0
Header = tuple[int, int]


def exchange(sent: Header, wanted: Header) -> None:
    """A publisher and a reader, each in a thread, send and compare a header."""
    deadline = SharedDeadline(TIMEOUT_S)
    store = serve_readers("127.0.0.1", TIMEOUT_S)
    term = GroupEpoch(1, "127.0.0.1", store.port, ("reader",))

    def publish() -> None:
        group = BroadcastGroup(store, term, PUBLISHER_RANK, torch.device("cpu"), deadline)
        group.verify_header(sent, deadline)

    def read() -> None:
        group = BroadcastGroup(join_store(term, deadline), term, 1, torch.device("cpu"), deadline)
        group.verify_header(wanted, deadline)

    with ThreadPoolExecutor(2) as threads:
        publishing, reading = threads.submit(publish), threads.submit(read)
        publishing.result(TIMEOUT_S)
        reading.result(TIMEOUT_S)


def test_who_wants_what_is_sent_goes_on() -> None:
    exchange((1, 4), (1, 4))


@pytest.mark.parametrize("wanted", [(1, 5), (2, 4)])
def test_who_wants_another_version_or_term_takes_nothing(wanted: Header) -> None:
    text = rf"received epoch and version \(1, 4\), expected \({wanted[0]}, {wanted[1]}\)"
    with pytest.raises(WeightsError, match=text):
        exchange((1, 4), wanted)
