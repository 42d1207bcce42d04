"""What all tests share: how long a test takes says nothing here, on machines of any speed."""

from hypothesis import settings

settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
