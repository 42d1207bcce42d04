"""Agreement of a broadcast's members before anything is sent."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.weights.transports.collective import (
    PUBLISHER_RANK,
    BroadcastGroup,
    GroupEpoch,
    SharedDeadline,
    join_store,
    serve_readers,
)

TIMEOUT_S = 20.0
Header = tuple[int, int]


def exchange(sent: Header, expected: Header) -> None:
    """Send and compare a header in two threads, as publisher and reader."""
    deadline = SharedDeadline(TIMEOUT_S)
    store = serve_readers("127.0.0.1", TIMEOUT_S)
    epoch = GroupEpoch(1, "127.0.0.1", store.port, ("reader",))

    def publish() -> None:
        group = BroadcastGroup(store, epoch, PUBLISHER_RANK, torch.device("cpu"), deadline)
        group.verify_header(sent, deadline)

    def read() -> None:
        group = BroadcastGroup(join_store(epoch, deadline), epoch, 1, torch.device("cpu"), deadline)
        group.verify_header(expected, deadline)

    with ThreadPoolExecutor(2) as threads:
        publishing, reading = threads.submit(publish), threads.submit(read)
        publishing.result(TIMEOUT_S)
        reading.result(TIMEOUT_S)


def test_equal_headers_pass():
    exchange((1, 4), (1, 4))


@pytest.mark.parametrize("expected", [(1, 5), (2, 4)])
def test_a_different_version_or_epoch_is_refused(expected: Header):
    text = rf"received epoch and version \(1, 4\), expected \({expected[0]}, {expected[1]}\)"
    with pytest.raises(WeightsError, match=text):
        exchange((1, 4), expected)
