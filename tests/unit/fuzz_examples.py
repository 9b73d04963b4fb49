"""How long fuzz tests search: fixed examples in a test run, a new seed each time in make fuzz."""

from hypothesis import HealthCheck, settings


def bounded(max_examples):
    """Settings of a property: so many examples, always the same, unless the profile is "fuzz"."""
    if settings.get_current_profile_name() == "fuzz":
        return settings()
    return settings(
        max_examples=max_examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
