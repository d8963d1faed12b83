import pytest

# The checks are a plain module: ask for the long messages that asserts in test files have.
pytest.register_assert_rewrite("contract.model_checks")
