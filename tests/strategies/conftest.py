"""Small pools, one thread, and the profile that the suite runs under."""

from __future__ import annotations

import os

import pytest
import torch

from kvcore.models import Geometry
from kvcore.strategies.profiles import PROFILES, Profile

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def profile() -> Profile:
    return PROFILES[os.environ.get("KVCORE_PROFILE", "ci")]


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return Geometry(page_size=request.param, full_pages=8, swa_pages=6)
