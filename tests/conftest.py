"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run the reference test in every combination of settings, not in a chosen few",
    )
