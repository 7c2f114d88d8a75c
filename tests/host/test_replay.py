"""When a launch is recorded, replayed, given up, or left alone; the driver is a stand-in."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cudnn_frost_sm120 import replay
from cudnn_frost_sm120.replay import Replay


class Driver:
    """Records and launches in a list."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.capturing: set[int] = set()
        self.alive: dict[int, Any] = {}
        self.fails = False

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def record_graph(self, enqueue: Any) -> int:
        if self.fails:
            raise RuntimeError("no")
        executable = 1000 + len(self.log)
        self.alive[executable] = enqueue
        self.log.append(("record", executable))
        return executable

    def launch_graph(self, executable: int, stream: int) -> None:
        assert executable in self.alive
        self.log.append(("replay", stream))

    def destroy_graph(self, executable: int) -> None:
        del self.alive[executable]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(replay, "driver", made)
    monkeypatch.setattr(replay, "_recorded", replay.deque())
    return made


def launches(driver: Driver) -> Replay:
    return Replay(lambda stream: driver.log.append(("launch", stream)))


def kinds(driver: Driver) -> list[str]:
    return [kind for kind, _ in driver.log]


def test_the_second_launch_is_recorded(driver: Driver) -> None:
    run = launches(driver)
    for stream in (1, 2, 3):
        run(stream)
    assert [entry for entry in driver.log if entry[0] != "record"] == [("launch", 1), ("replay", 2), ("replay", 3)]
    assert kinds(driver).count("record") == 1


def test_a_captured_stream_gets_the_kernels_themselves(driver: Driver) -> None:
    run = launches(driver)
    run(1)
    run(1)
    driver.capturing = {5}
    run(5)
    run(1)
    assert kinds(driver) == ["launch", "record", "replay", "launch", "replay"]


def test_a_driver_that_cannot_record(driver: Driver) -> None:
    driver.fails = True
    run = launches(driver)
    for _ in range(5):
        run(1)
    assert kinds(driver) == ["launch"] * 5


def test_recorded_graphs_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEPT", 3)
    runs = [launches(driver) for _ in range(5)]
    for run in runs:
        run(1)
        run(1)
    assert len(driver.alive) == 3
    driver.log.clear()
    runs[0](1)  # given up: an ordinary launch, and not recorded again at once
    runs[4](1)
    assert kinds(driver) == ["launch", "replay"]
    for _ in range(replay._PATIENCE):
        runs[0](1)
    assert kinds(driver)[-1] == "replay"
    assert len(driver.alive) == 3


def test_a_graph_goes_with_its_launch(driver: Driver) -> None:
    run = launches(driver)
    run(1)
    run(1)
    assert driver.alive
    del run
    assert not driver.alive


def test_threads_record_once(driver: Driver) -> None:
    run = launches(driver)
    threads = [threading.Thread(target=lambda: [run(1) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds(driver).count("record") == 1
    assert kinds(driver).count("launch") == 1
    assert kinds(driver).count("replay") == 399
