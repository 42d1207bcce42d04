"""The built-in kinds of reward, one file each."""
