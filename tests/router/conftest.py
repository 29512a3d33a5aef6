from __future__ import annotations

from hypothesis import settings

# The same examples everywhere, and no limit on a busy machine's time.
settings.register_profile("kvdeploy", deadline=None, derandomize=True, database=None)
settings.load_profile("kvdeploy")
