"""What a test started itself, told from the runs that other tests play meanwhile."""

import psutil

from tests.e2e.launched import MARK


def descendants() -> set[psutil.Process]:
    """Every process below this one, but for runs that were launched with a mark, and theirs."""
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        try:
            if MARK not in child.environ():
                found |= {child, *child.children(recursive=True)}
        except psutil.Error:
            # It ended just now.
            continue
    return found
