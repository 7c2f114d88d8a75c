"""Everything here needs a GPU that the engine serves, and is skipped without one."""

from __future__ import annotations

import faulthandler

import pytest

from ..conftest import REAL_STDERR
from .cases import Case, unserved

HANG_SECONDS = 300
_ENABLE = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"


REPORT: pytest.StashKey = pytest.StashKey()
_SKIPPED: pytest.StashKey = pytest.StashKey()


def pytest_configure(config):
    from .report import Report

    config.stash[REPORT] = Report()


def _mine(items):
    return [item for item in items if "tests/gpu" in item.path.as_posix()]


def pytest_collection_modifyitems(config, items):
    from .precompile import usable_target

    reason = None
    try:
        usable_target()
    except NotImplementedError as error:
        reason = str(error)
    config.stash[_SKIPPED] = reason
    for item in _mine(items):
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    """Compile what the selected cases need, all at once; one after the other takes seconds each."""
    named = session.config.getoption("--warm")
    if session.config.option.collectonly or (not named and session.config.stash.get(_SKIPPED, "") is not None):
        return
    from cudnn_frost_sm120 import target

    from .precompile import fill_store, keys_of, precompile, usable_target

    cases = []
    for item in _mine(session.items):
        parameters = getattr(item, "callspec", None)
        given = parameters.params.values() if parameters else ()
        cases += [value for value in given if isinstance(value, Case) and not unserved(value)]
    resolved = target.named(named) if named else usable_target()
    keys = keys_of(cases, resolved)
    if named:
        said, failed = fill_store(keys, resolved)
        pytest.exit(said, returncode=1 if failed else 0)
    precompile(keys, resolved)


@pytest.fixture(autouse=True)
def _hangs_end(request):
    """A kernel that hangs cannot be interrupted: the process ends, and says in which test."""
    descriptor = request.config.stash[REAL_STDERR]
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=descriptor)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _offer_engines(monkeypatch):
    monkeypatch.setenv(_ENABLE, "1")


@pytest.fixture
def check(request):
    """check(case, via="launcher"): pose, run, judge, and count the case in the report."""
    from . import harness

    def run(case: Case, via: str = "launcher"):
        missing = unserved(case)
        if missing:
            pytest.skip(f"not served yet: {', '.join(missing)}")
        for outcome in harness.check(case, via):
            request.config.stash[REPORT].add(request.node, outcome)

    return run


@pytest.fixture
def judge(request):
    """judge(problem, got): compare gradients that the test itself made run, and count the case in the report."""
    from . import harness

    def run(problem, got):
        outcome = harness.judge(problem, got)
        request.config.stash[REPORT].add(request.node, outcome)
        return outcome

    return run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = (yield).get_result()
    if "tests/gpu" in item.path.as_posix() and (call.when == "call" or not result.passed):
        item.config.stash[REPORT].finish(item, result.outcome)


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--verification-report")
    if path and config.stash.get(_SKIPPED, "") is None:
        from .report import write

        write(path, config.stash[REPORT], terminalreporter.config.invocation_params.args)
        terminalreporter.write_line(f"verification report: {path}")
