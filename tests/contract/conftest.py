import pytest

# A failing contract shows its values, as a test of our own would.
pytest.register_assert_rewrite("resilient.testing.store_contract")
