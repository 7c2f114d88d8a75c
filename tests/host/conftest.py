"""What the host tests share: our engine registered and opted in, planning for sm_120 with no device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

FLAG = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"
TARGET = "CUDNN_FROST_SM120_TARGET"


@pytest.fixture
def opted_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flag is set, our engine is in cudnn-frontend's table, and it plans for sm_120 with no device, even if there
    is one."""
    import cudnn_frost_sm120

    def no_device(graph: object) -> int:
        raise NotImplementedError("there is no CUDA device to plan for; set CUDNN_FROST_SM120_TARGET=sm_120")

    monkeypatch.setenv(FLAG, "1")
    monkeypatch.setenv(TARGET, "sm_120")
    monkeypatch.delenv("CUDNN_FROST_SM120_STAND_IN", raising=False)
    monkeypatch.setattr("cudnn_frost_sm120.target._current_device", no_device)
    cudnn_frost_sm120.register()
    yield
    cudnn_frost_sm120.register()
