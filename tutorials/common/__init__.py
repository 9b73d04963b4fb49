"""What several tutorials need. Import it before the libraries, which it keeps quiet."""

import common.quiet  # noqa: F401
