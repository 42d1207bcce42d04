"""The generation engine: requests, partial rollouts, pause and resume."""
