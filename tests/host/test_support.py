"""docs/support.md is what the rules' data says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudnn_frost_sm120 import support

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_page_is_up_to_date() -> None:
    assert support.main(["--check", "--path", str(PAGE)]) == 0


def test_write_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "support.md"
    assert support.main(["--check", "--path", str(page)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert support.main(["--write", "--path", str(page)]) == 0
    assert support.main(["--check", "--path", str(page)]) == 0


def test_every_feature_is_a_row() -> None:
    titles = [row[0] for row in support.rows()]
    assert len(titles) == len(set(titles))
    for feature in support.FEATURES:
        assert any(title.startswith(feature.title) for title in titles)
    assert len({feature.name for feature in support.FEATURES}) == len(support.FEATURES)
