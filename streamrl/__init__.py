"""streamrl: post-train language models with reinforcement learning as a stream of experience."""

__version__ = "0.1.0"
