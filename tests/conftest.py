"""What all tests share: whole runs, and that how long one takes says nothing here."""

from hypothesis import settings

# Fixtures of the runs that several tests read.
pytest_plugins = ("tests.e2e.shared_runs",)

# On machines of any speed.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
