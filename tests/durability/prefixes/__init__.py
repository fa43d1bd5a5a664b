"""Recorded runs, cut after any of their events and finished again, for tests of recovery."""

import pytest

pytest.register_assert_rewrite("tests.durability.prefixes.checks")
