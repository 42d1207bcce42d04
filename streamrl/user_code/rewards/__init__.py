"""Load reward code of users and packages, and run it in worker processes."""
