import gc
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support import LeakCheck
from tests.support.seeds import use_hypothesis_profile
from tests.support.template import rank_template

use_hypothesis_profile()

# Torch asks a name server for the name of each address it connects to. One that drops a question must not cost more
# than a second: time limits of tests are short.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def pytest_configure() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and processes of tests would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _template_of_ranks() -> Iterator[None]:
    """Imports torch in the background while the first tests run."""
    rank_template()
    yield
    rank_template().close()


@pytest.fixture
def leak_check() -> Iterator[LeakCheck]:
    """Fails the test when it leaves file descriptors, threads, child processes or shared memory behind.

    `leak_check.rebase()` after a warm-up; `leak_check.check()` in the middle of a test.
    """
    check = LeakCheck()
    yield check
    check.check()


def pytest_collection_finish() -> None:
    """Keep modules and tests out of later collections: each would look at every object of torch."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
