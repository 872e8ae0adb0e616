from __future__ import annotations

import pytest
from coroutine_tests import run_test
from gateway_harness import run


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_test(pyfuncitem, run)
