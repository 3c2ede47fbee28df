from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network
torch.set_num_threads(1)  # tiny models; and several test runs may share a machine
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
