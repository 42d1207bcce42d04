"""Adapters: environments of other packages as classes of users (`environment.kind`)."""
