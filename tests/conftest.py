"""Settings shared by all tests: hypothesis tries the same problems on every run, without a clock."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")
