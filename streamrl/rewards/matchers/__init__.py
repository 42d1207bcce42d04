"""Answer matchers: pure functions of a completion and a ground truth."""
