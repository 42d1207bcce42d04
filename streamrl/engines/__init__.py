"""The engines behind the stages: generation, training, scoring forwards. No Ray in here."""
