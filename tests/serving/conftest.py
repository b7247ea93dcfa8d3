"""The command line."""

from tests.commands.conftest import said  # noqa: F401  # the fixture
