"""Commands of the `streamrl` program, one module each."""
