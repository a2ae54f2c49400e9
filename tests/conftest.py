"""What holds for the whole suite."""

import os

import pytest
from hypothesis import settings

# As the `kvrelay` command does, and for the same reason; before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# With --hypothesis-profile=patient, those who look for rare orders of events look for longer.
settings.register_profile("patient", max_examples=1500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run the reference test in every combination of settings, not in a chosen few",
    )
    parser.addoption(
        "--all-faults",
        action="store_true",
        help="walk through every fault with several seeds, and soak for long",
    )
