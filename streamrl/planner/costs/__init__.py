"""Cost model: predicts seconds and bytes of a placement from shapes, devices and cost constants."""
