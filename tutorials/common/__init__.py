"""What several tutorials need. Import it before the libraries, which it keeps quiet."""

from . import quiet  # noqa: F401
