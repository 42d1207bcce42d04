"""Command-line arguments shared by commands: parsers and checks."""
