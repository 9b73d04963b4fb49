"""How property tests search: for as long as a slow machine needs, and they say how to repeat."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")
