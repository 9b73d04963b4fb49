"""How property tests search: for as long as a slow machine needs, and they say how to repeat."""

import contextlib

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, print_blob=True)
# What fuzz_examples.py bounds takes the number of its examples from this profile: make fuzz.
settings.register_profile(
    "fuzz",
    deadline=None,
    print_blob=True,
    max_examples=1500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("unit")


@pytest.fixture(scope="package", autouse=True)
def there_is_a_cluster():
    """As far as streams look, which ask it why a connection to a fake actor has ended."""
    with pytest.MonkeyPatch.context() as patched:
        file = "torchrl_vllm_sync.requests.dispatch"
        patched.setattr(f"{file}.staying_connected", lambda: contextlib.nullcontext(True))
        yield
