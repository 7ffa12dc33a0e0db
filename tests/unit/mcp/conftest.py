from __future__ import annotations

import pytest

from unit.mcp.fake_corral import FakeCorral


@pytest.fixture
def corral() -> FakeCorral:
    return FakeCorral()
