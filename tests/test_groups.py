"""What `make test` relies on to stay within its time."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("alone")
def test_groups_of_tests_are_seen_by_xdist(request: pytest.FixtureRequest) -> None:
    """Where they are not, every worker makes the module's runs again; pytest and pytest-xdist must fit each other."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not request.config.getvalue("loadgroup"):
        pytest.skip("one process, or no groups asked for")
    assert request.node.nodeid.endswith("@alone")
