import faulthandler
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from inprocess.modes import Modes
from inprocess.torn_locks import release_import_lock
from tests.support import LeakCheck
from tests.support.quick_keepers import end_keeper_template, install, select_keepers
from tests.support.seeds import use_hypothesis_profile
from tests.support.template import rank_template

use_hypothesis_profile()
install()

# Torch asks a name server for the name of each address it connects to. One that drops a question must not cost more
# than a second: time limits of tests are short.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


_HANG_S = 30
_stderr = -1
_known_modules = 0  # when objects were frozen


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End this process, with its stacks, if a test does not end after its time limit: it hangs in a call of C.

    The limit raises an exception, which does not get through there. Another process goes on with the other tests.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker is not None and marker.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + _HANG_S, exit=True, file=_stderr)
    select_keepers(item.nodeid)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        _keep_modules_out_of_collections()


def pytest_configure() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and processes of tests would inherit that."""
    global _stderr
    _stderr = os.dup(2)  # that of this process, before it is captured
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _template_of_ranks() -> Iterator[None]:
    """Imports torch in the background while the first tests run."""
    rank_template()
    yield
    rank_template().close()
    end_keeper_template()


_RESTORED = "restored after the test"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _restored_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restores modes of torch, variables that number ranks and the import lock, which a test has left changed.

    The tests after it would fail, in another place of each run. The summary names the test.
    """
    modes = Modes()
    modes.record()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    yield
    changed = modes.restore()
    if release_import_lock():  # an exception that was thrown into an import; other threads could import nothing
        changed.append("the lock of the import system")
    for name, value in variables.items():
        if os.environ.get(name) == value:
            continue
        changed.append(f"{name}={os.environ.get(name)}")
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    if changed:
        request.node.user_properties.append((_RESTORED, ", ".join(changed)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests after which modes or variables had to be restored."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            for name, text in report.user_properties:
                if name == _RESTORED:
                    terminalreporter.write_line(f"{_RESTORED}: {report.nodeid}: {text}", yellow=True)


@pytest.fixture
def leak_check() -> Iterator[LeakCheck]:
    """Fails the test when it leaves file descriptors, threads, child processes or shared memory behind.

    `leak_check.rebase()` after a warm-up; `leak_check.check()` in the middle of a test.
    """
    if importlib.util.find_spec("numcodecs") is not None:
        importlib.import_module("numcodecs.blosc").compress(b"", b"lz4", 1)  # it makes a semaphore, and keeps it
    check = LeakCheck()
    yield check
    check.check()


def pytest_collection_finish() -> None:
    _keep_modules_out_of_collections()


def _keep_modules_out_of_collections() -> None:
    """Freeze what there is, if many modules were imported: each collection would look at every object of torch.

    A test that imports a framework would make each collection of the tests after it take a tenth of a second.
    """
    global _known_modules
    if len(sys.modules) > _known_modules + 100:
        gc.collect()
        gc.freeze()
        _known_modules = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
